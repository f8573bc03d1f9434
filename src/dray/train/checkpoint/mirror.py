"""checkpoint.mirror: rank 0 copies each checkpoint to a bucket or another folder, and at a start all ranks fetch one.

Rank 0 copies the manifest last, so a copy without a manifest is incomplete. If a copy fails, rank 0 warns, and the run
goes on.
"""

from __future__ import annotations

import errno
import operator
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO

from dray.contract import exit_codes, findings
from dray.contract.files import open_regular
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.train import ranks
from dray.train.checkpoint import manifest
from dray.train.collectives import on_all, on_rank_0
from dray.train.data import remote
from dray.train.errors import described, say
from dray.train.runtime.heartbeat import BEAT_S, Moved

if TYPE_CHECKING:
    from dray.train.loop.metrics import Metrics

_WHAT = "the mirror of the checkpoints"
_SENT_AT_ONCE, _FETCHED_AT_ONCE = 16, 4  # how many files rank 0 sends at once, and each rank fetches at once
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # errors of the checkpoint folder's disk, not of the mirror


class Mirror:
    """The mirror of one run. `place` is s3://, gs:// or a folder."""

    def __init__(self, place: str, metrics: Metrics, *, keep: int) -> None:
        self.place, self.metrics, self.keep = place, metrics, keep
        self._remote = "://" in place
        self.trouble = ""
        """Why the last copy to the mirror, or its last listing, failed; empty if it worked."""
        self.steps: list[int] = []
        """The steps of which the mirror had complete copies at the start."""
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None  # the thread's last task
        self._lock = Lock()  # for the next two, which the threads that save and copy both use
        self._waiting: deque[Path] = deque(maxlen=1)
        self._copying: Path | None = None
        self._failed: Path | None = None  # the newest checkpoint, if its copy has failed
        self._moved = Moved()

    def find(self, folder: Path, *, required: bool) -> list[int]:
        """Return the steps of complete copies; on rank 0. `folder` is the checkpoint folder.

        Without an answer of the mirror the run ends if the copies are `required`: it has no checkpoint of its own.
        """
        with suppress(OSError):  # of the mirror's disk: then the listing fails too, and is a warning or ends the run
            self._check(folder)
        try:
            with remote.refusing_failures(self.place, _WHAT):
                self.steps = sorted(step for step, complete in self._list().items() if complete)
        except DrayError as error:
            self._warn(error, required=required)
        return self.steps

    def _check(self, folder: Path) -> None:
        """Refuse a mirror that is the checkpoint folder, or a folder that other users may write."""
        place = Path(self.place)
        if self._remote or not place.exists():
            return
        if place.samefile(folder):
            raise ConfigError(
                "checkpoint.mirror is the checkpoint folder itself",
                wanted="a place that survives the loss of this folder",
                found=self.place,
                fix="checkpoint.mirror=ANOTHER",
            )
        manifest.require_own(place)

    def fetch(self, part: Path, name: str, *, required: bool) -> str:
        """Fetch the copy `name` into the empty folder `part`; return why that failed, or an empty text.

        All ranks call it, and each fetches a share of the files. The caller compares them with their checksums.
        """
        missing: list[str] = []
        try:
            on_rank_0(lambda: self._fetch(part, name, [manifest.NAME]))
            about = on_rank_0(lambda: manifest.read(part))
            if "trouble" not in about:
                share = sorted(about["files"])[ranks.rank() :: ranks.world()]
                missing = on_all(lambda: self._fetch(part, name, share), operator.add)
        except UnfitError:  # this disk is full or fails: it would not take another copy either
            raise
        except DrayError as error:
            return self._warn(error, required=required)
        return str(about.get("trouble", "")) or ", ".join(f"it lacks {file}" for file in missing[:3])

    def put(self, path: Path) -> None:
        """Copy this checkpoint in a thread; on rank 0. It replaces an older one that waits to be copied."""
        with self._lock:
            self._waiting.append(path)
        self._pending = self._thread.submit(self._copy_waiting)

    def needs(self, path: Path) -> bool:
        """Whether this checkpoint is being copied or waits for it, and may not be deleted."""
        with self._lock:
            return path in (self._copying, *self._waiting)

    def settle(self) -> None:
        """Wait until the newest checkpoint is copied; if the copy fails, try once more."""
        self._wait()
        if self._failed:
            self.put(self._failed)
            self._wait()

    def _wait(self) -> None:
        while self._pending and not wait([self._pending], BEAT_S).done:
            self._moved.beat()

    def _warn(self, error: DrayError, *, required: bool) -> str:
        finding = error.finding
        if required:  # without it the run would begin with step 0 again
            code = exit_codes.RETRY if finding.code == exit_codes.FAILED else finding.code
            raise findings.error(finding._replace(code=code))
        trouble = f"{finding.problem}: {finding.found}"
        if ranks.rank() == 0:  # rank 0 alone copies, and resets this after a copy that works
            self.trouble = trouble
        say(f"WARNING: {trouble}")
        return trouble

    def _copy_waiting(self) -> None:
        with self._lock:
            if not self._waiting:  # the task before has taken the checkpoint of this one too
                return
            path = self._copying = self._waiting.pop()
        step = int(path.name.removeprefix("step-"))
        copied, trouble = False, ""
        try:
            with remote.refusing_failures(self.place, _WHAT, "written"):
                self._copy(path)
                copied = True
                self._prune(step)
        except Exception as error:  # whatever the store answers, the run goes on
            trouble = f"{error.problem}: {error.finding.found}" if isinstance(error, DrayError) else described(error)
            trouble = " ".join(trouble.split())[:300]
        if trouble or self.trouble:  # each failure, and the first copy after one
            text = f"WARNING: {trouble}" if trouble else f"step {step} is in {self.place}"
            why = {"why": f"{trouble}: {self.place}"} if trouble else {}
            self.metrics.write("mirror", text, checkpoint=step, saved=copied, **why)
        problem = "older copies are not deleted" if copied else f"the copy of step {step} failed"
        self.trouble = f"{problem}: {trouble}" if trouble else ""
        self._failed = None if copied else path
        self._copying = None

    def _system(self) -> tuple[Any, str]:
        """Return fsspec's file system, and the mirror's path in it."""
        import fsspec  # noqa: PLC0415  only a run with a mirror needs it

        remote.register()
        system, root = fsspec.core.url_to_fs(self.place)
        return system, root.rstrip("/")

    def _list(self) -> dict[int, bool]:
        """Return the steps of all copies, and whether each copy is complete."""
        system, root = self._system()
        try:
            paths = system.ls(root, detail=False)
        except FileNotFoundError:
            if self._remote:
                system.info(root.partition("/")[0])  # raises if the bucket does not exist
            return {}
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        steps = [int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()]
        return {step: system.exists(f"{root}/step-{step}/{manifest.NAME}") for step in steps}

    def _copy(self, path: Path) -> None:
        system, root = self._system()
        folder = f"{root}/{path.name}"
        if not self._remote:
            Path(root).mkdir(mode=0o755, parents=True, exist_ok=True)
            self._check(path.parent)  # again: at the start the folder may not have been there, or not readable
            Path(folder).mkdir(mode=0o755, exist_ok=True)
        if system.exists(f"{folder}/{manifest.NAME}"):  # an earlier attempt has saved this step too
            system.rm_file(f"{folder}/{manifest.NAME}")

        def send(name: str) -> None:
            with open_regular(path / name, link=False) as source, self._new(system, f"{folder}/{name}") as target:
                self._move(source, target)

        with ThreadPoolExecutor(_SENT_AT_ONCE) as pool:
            list(pool.map(send, manifest.read(path)["files"]))
        send(manifest.NAME)

    def _new(self, system: Any, path: str) -> AbstractContextManager[BinaryIO]:  # noqa: ANN401  fsspec has no types
        """Open a new file of the mirror. If the mirror is a folder, no group may write the file, whatever the umask."""
        if self._remote:
            file: AbstractContextManager[BinaryIO] = system.open(path, "wb")
            return file
        Path(path).unlink(missing_ok=True)
        return manifest.new_file(Path(path))

    def _prune(self, newest: int) -> None:
        """Delete incomplete copies, and complete ones but the newest `keep`. Copies of later steps than `newest` stay:
        a run that went further has made them."""
        system, root = self._system()
        copies = {step: complete for step, complete in self._list().items() if step <= newest}
        kept = sorted(step for step, complete in copies.items() if complete)[-self.keep :]
        for step in copies.keys() - {*kept, newest}:
            if copies[step]:  # the manifest first: then a copy of which a part is deleted counts as incomplete
                system.rm_file(f"{root}/step-{step}/{manifest.NAME}")
            system.rm(f"{root}/step-{step}", recursive=True)

    def _fetch(self, part: Path, name: str, files: Iterable[str]) -> list[str]:
        """Fetch these files of the copy `name` into `part`; return those that the copy lacks."""
        with remote.refusing_failures(self.place, _WHAT):
            system, root = self._system()
            if not self._remote:
                manifest.require_own(Path(root, name))

            def fetch(file: str) -> list[str]:
                try:
                    with system.open(f"{root}/{name}/{file}", "rb") as source, manifest.new_file(part / file) as target:
                        self._move(source, target)
                except FileNotFoundError:
                    return [file]
                except OSError as error:
                    if error.errno not in _DISK:
                        raise
                    raise UnfitError(
                        "a checkpoint of the mirror cannot be written",
                        where=part / file,
                        wanted=f"room for {name} of {self.place}",
                        found=error.strerror,
                        fix="make room on that disk, or in your quota; or checkpoint.folder=FOLDER on another disk",
                    ) from error
                return []

            with ThreadPoolExecutor(_FETCHED_AT_ONCE) as pool:
                return [file for missing in pool.map(fetch, files) for file in missing]

    def _move(self, source: BinaryIO, target: BinaryIO) -> None:
        while block := source.read(manifest.BLOCK):
            target.write(block)
            self._moved.count(len(block))
