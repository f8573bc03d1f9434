"""Send the metrics of a run, from metrics.jsonl, to the servers of its trackers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from dray.contract import files, run_folder, secrets
from dray.contract.findings import ConfigError, DrayError, counted
from dray.contract.image_tasks import Sync
from dray.train.loop.trackers import KINDS, Tracked, newest, numbers, read, require, started

_EVERY_S = 5.0


def run(job: Sync) -> None:
    """Send once, or until the run has ended. Each step is sent once, from the last attempt that took it."""
    for name in job.trackers:
        _online(name, Path(job.folder))
    require(job.trackers, "pip install {} beside dray, or --engine docker if the image has it")
    sending = [_Sending(name, job) for name in job.trackers]
    while True:
        ended = not job.follow or _ended(Path(job.folder))  # what it wrote before is read below
        for one in sending:
            one.send()
        if ended:
            break
        time.sleep(_EVERY_S)
    for one in sending:
        one.finish()


def _online(name: str, folder: Path) -> None:
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
    """Whether no attempt will follow."""
    attempts = [path for path in run.glob(run_folder.attempt("*")) if path.name.rpartition("-")[2].isdigit()]
    last = max(attempts, key=lambda path: int(path.name.rpartition("-")[2]))
    try:
        result = json.loads(files.read(last / run_folder.RESULT, limit=1 << 20))
        return not (result["next"] or {}).get("requeue")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


class _Sending:
    def __init__(self, name: str, job: Sync) -> None:
        self._name, self._run, self._count = name, Path(job.folder), 0
        folder = self._run / run_folder.TRACKERS
        self._state = folder / f"{name}-sent.json"
        try:
            self._sent = {str(event): int(step) for event, step in json.loads(files.read(self._state)).items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            self._sent = {}
        try:
            self._tracker = started(name, Tracked(job.project, job.run, folder, first_step=int(bool(self._sent))))
        except Exception as error:
            raise self._refused(error) from error

    def send(self) -> None:
        """Send the lines that are not sent yet."""
        steps = {(event["step"], event["event"]): event for event in read(self._run)}
        events = [one for _, one in sorted(steps.items()) if one["step"] > self._sent.get(one["event"], -1)]
        try:
            for event in events:
                self._tracker.log(numbers(event), step=event["step"])
        except Exception as error:
            raise self._refused(error) from error
        self._count += len(events)
        self._sent |= newest(events)

    def finish(self) -> None:
        """Wait for the tracker, then note what it has taken; the rest is sent next time."""
        try:
            self._tracker.finish()
        except Exception as error:
            raise self._refused(error) from error
        files.write_atomic(self._state, json.dumps(self._sent))
        print(f"{self._name}: {counted(self._count, 'line')} of metrics sent", flush=True)

    def _refused(self, error: Exception) -> DrayError:
        return DrayError(
            f"the metrics cannot be sent to {self._name}",
            found=secrets.redacted(" ".join(str(error).split()))[:400] or type(error).__name__,
            fix="check the network and its variables, then run dray report --sync again; nothing is lost",
        )
