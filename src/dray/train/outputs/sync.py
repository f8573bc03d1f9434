"""Send the metrics of a run, from metrics.jsonl, to the servers of its trackers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dray.contract import files, run_folder, secrets
from dray.contract.findings import ConfigError, DrayError, counted
from dray.contract.trainer.image_tasks import Sync
from dray.train.loop.trackers import KINDS, Tracked, newest, numbers, read, require, start_tracker

_EVERY_S = 5.0


def run(job: Sync) -> None:
    """Send once, or until the run has ended. Each step is sent once, from the last attempt that took it."""
    folder = Path(job.folder)
    for name in job.trackers:
        _set_online(name, folder)
    require(job.trackers, "pip install {} beside dray, or --engine docker if the image has it")
    senders = [_Sender(name, job) for name in job.trackers]
    while True:
        ended = not job.follow or _ended(folder)  # ask first: lines that are written after this answer would be lost
        for sender in senders:
            sender.send()
        if ended:
            break
        time.sleep(_EVERY_S)
    with ExitStack() as finishing:  # all of them, also if one fails
        for sender in senders:
            finishing.callback(sender.finish)


def _set_online(name: str, folder: Path) -> None:
    kind = KINDS[name]
    if not (kind.online or kind.server):
        raise ConfigError(
            f"{name} has no server", found=f"only files, if the run used it: {folder}/trackers",
            fix=f"read them with {name}'s own program, here or copied",
        )  # fmt: skip
    if kind.server and not any(os.environ.get(variable) for variable in kind.server):
        raise ConfigError(
            f"{name} needs the address of its server", wanted=" or ".join(kind.server), found="not set here",
            fix=f"export {kind.server[0]}=...",
        )  # fmt: skip
    os.environ |= kind.online


def _ended(run: Path) -> bool:
    """Whether the newest attempt has ended and no attempt will follow."""
    attempts = [path for path in run.glob(run_folder.attempt("*")) if path.name.rpartition("-")[2].isdigit()]
    result = max(attempts, key=lambda path: int(path.name.rpartition("-")[2])) / run_folder.RESULT
    return result.exists() and not (json.loads(result.read_text(encoding="utf-8"))["next"] or {}).get("requeue")


@contextmanager
def _send_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DrayError(
            f"the metrics cannot be sent to {name}",
            found=secrets.redacted(" ".join(str(error).split()))[:400] or type(error).__name__,
            fix="check the network and its variables, then run dray report --sync again; nothing is lost",
        ) from error


class _Sender:
    """Sends metrics to one tracker, and notes in a file which steps it has taken."""

    def __init__(self, name: str, job: Sync) -> None:
        self._name, self._run, self._count = name, Path(job.folder), 0
        folder = self._run / run_folder.TRACKERS
        self._file = folder / f"{name}-sent.json"
        self._sent: dict[str, int] = {}
        if self._file.exists():
            self._sent = json.loads(self._file.read_text(encoding="utf-8"))
        with _send_errors(name):
            self._tracker = start_tracker(name, Tracked(job.project, job.run, folder, first_step=int(bool(self._sent))))

    def send(self) -> None:
        """Send the lines that are not sent yet."""
        steps = {(event["step"], event["event"]): event for event in read(self._run)}
        events = [event for (step, kind), event in sorted(steps.items()) if step > self._sent.get(kind, -1)]
        with _send_errors(self._name):
            for event in events:
                self._tracker.log(numbers(event), step=event["step"])
        self._count += len(events)
        self._sent |= newest(events)

    def finish(self) -> None:
        """Wait until the tracker has taken them; if it fails, the next call sends them again."""
        with _send_errors(self._name):
            self._tracker.finish()
        files.write_atomic(self._file, json.dumps(self._sent))
        print(f"{self._name}: {counted(self._count, 'line')} of metrics sent", flush=True)
