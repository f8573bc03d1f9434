"""Checkpoints in another place: rank 0 copies each while training goes on, and fetches one where the folder has none.

Every byte is read back from there and compared with the manifest's checksums before the manifest follows: what has a
manifest is complete. A copy that fails is tried again, and never ends the run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from dray.contract import exit_codes, findings
from dray.contract.files import open_regular
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.train import manifest
from dray.train.data import remote
from dray.train.errors import say
from dray.train.heartbeat import heartbeat

if TYPE_CHECKING:
    from dray.train.metrics import Metrics

_BEAT_S = 10.0
RETRY_S = 60.0
_AT_ONCE = 4  # files
_BLOCK = 1 << 22
_WHAT = "the mirror of the checkpoints"


class Mirror:
    """That of one run, on rank 0. `place` is s3://, gs:// or a folder."""

    def __init__(self, place: str, metrics: Metrics, *, keep: int) -> None:
        self.place, self.metrics, self.keep = place, metrics, keep
        self.copying: int | None = None  # retention leaves it in the checkpoint folder
        self.trouble = ""
        self.known: list[int] = []  # the steps that were there at the start
        self._next: Path | None = None
        self._tried = False
        self._changed = Condition()
        self._thread: Thread | None = None
        self._moved = 0  # bytes

    def begin(self, folder: Path, *, instead: bool) -> list[int]:
        """The steps that are complete there. Where it does not answer, a run ends unless it has others `instead`."""
        if "://" not in self.place and Path(self.place).exists():
            if Path(self.place).samefile(folder):
                raise ConfigError(
                    "checkpoint.mirror is the checkpoint folder itself",
                    wanted="another place, which is there when this folder is lost",
                    found=self.place,
                    fix="checkpoint.mirror=ANOTHER",
                )
            manifest.require_own(Path(self.place))
        try:
            with remote.reading(self.place, _WHAT):
                self.known = self._steps()
        except DrayError as failed:
            self._warned(failed, instead=instead)
        return self.known

    def fetch(self, part: Path, path: Path, room: Callable[[int], None], *, instead: bool) -> str:
        """Make this checkpoint of the one there, in the empty folder `part` first; why it could not be.

        `room` is asked for so many bytes.
        """
        try:
            with remote.reading(self.place, _WHAT):
                trouble = self._fetch(part, path.name, room)
        except UnfitError:  # this disk
            raise
        except DrayError as failed:
            trouble = self._warned(failed, instead=instead)
        if not trouble:
            manifest.sync(part)
            part.rename(path)
            manifest.sync(path.parent)
        return trouble

    def _warned(self, failed: DrayError, *, instead: bool) -> str:
        finding = failed.finding
        if not instead:  # to begin from nothing is not what was meant
            again = exit_codes.RETRY if finding.code == exit_codes.FAILED else finding.code
            raise findings.error(finding._replace(code=again))
        self.trouble = f"{finding.problem}: {finding.found}"
        say(f"WARNING: {self.trouble}")
        return self.trouble

    def _steps(self) -> list[int]:
        from pyarrow.fs import FileSelector, FileType  # noqa: PLC0415  a run without a mirror does without

        system, root = self._system()
        within = system.get_file_info(FileSelector(root, allow_not_found=True))
        if not within and "://" in self.place:
            (bucket,) = system.get_file_info([root.partition("/")[0]])
            if bucket.type == FileType.NotFound:
                raise FileNotFoundError(bucket.path)
        folders = {step: one.path for one in within if (step := _step(one.path)) is not None}
        ends = system.get_file_info([f"{folder}/{manifest.NAME}" for folder in folders.values()])
        return sorted(step for step, end in zip(folders, ends, strict=True) if end.type == FileType.File)

    def _fetch(self, part: Path, name: str, room: Callable[[int], None]) -> str:
        system, root = self._system()
        folder = f"{root}/{name}"
        if "://" not in self.place:
            manifest.require_own(Path(folder))
        _fetched(system, f"{folder}/{manifest.NAME}", part / manifest.NAME, manifest.LIMIT)
        found = manifest.read(part)
        if "trouble" in found:
            return str(found["trouble"])
        files = found["files"]
        room(sum(one["bytes"] for one in files.values()))

        def fetch(name: str) -> str:
            (part / name).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            own = _fetched(system, f"{folder}/{name}", part / name, files[name]["bytes"])
            return "" if own == files[name] else f"{name} is not what was written"

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return next(filter(None, pool.map(fetch, files)), "")

    def put(self, path: Path) -> None:
        """Begin to copy this checkpoint. One that still waits is left out: the newest is what counts."""
        with self._changed:
            self._next, self._tried = path, False
            if self._thread is None:
                self._thread = Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until the newest is there, or could not be copied, twice."""
        moved = -1
        for _ in range(2):
            with self._changed:
                self._tried = False
                self._changed.notify_all()
                while not self._changed.wait_for(
                    lambda: self.copying is None and (self._next is None or self._tried), _BEAT_S
                ):
                    if moved != self._moved:  # a copy that goes on is no hang, however long it takes
                        moved = self._moved
                        heartbeat.beat()

    def _count(self, size: int) -> None:
        self._moved += size

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._tried:
                    self._changed.wait_for(lambda: not self._tried, RETRY_S)
                else:
                    self._changed.wait_for(lambda: self._next is not None)
                path = cast(Path, self._next)
                self._next, self._tried, self.copying = None, False, _step(path.name)
            trouble = self._copied(path)
            step = cast(int, self.copying)
            if trouble or self.trouble:
                self.trouble = trouble and f"the copy of step {step} failed: {trouble}"
                text = f"WARNING: {trouble}" if trouble else f"step {step} is in {self.place}"
                why = {"why": f"{trouble}: {self.place}"} if trouble else {}
                self.metrics.write("mirror", text, checkpoint=step, saved=not trouble, **why)
            with self._changed:
                if trouble and self._next is None and path.is_dir():
                    self._next, self._tried = path, True
                self.copying = None
                self._changed.notify_all()

    def _copied(self, path: Path) -> str:
        """Why it is not there; empty where it is."""
        try:
            with remote.reading(self.place, _WHAT):
                self._copy(path)
        except Exception as error:  # whatever a store answers: the run goes on
            finding = error.finding if isinstance(error, DrayError) else None
            text = f"{finding.problem}: {finding.found}" if finding else f"{type(error).__name__}: {error}"
            return " ".join(text.split())[:300]
        return ""

    def _copy(self, path: Path) -> None:
        found = manifest.read(path)
        if "trouble" in found:
            raise OSError(found["trouble"])
        system, root = self._system()
        folder, files = f"{root}/{path.name}", found["files"]
        if "://" not in self.place:
            Path(root).mkdir(mode=0o755, parents=True, exist_ok=True)
            Path(folder).mkdir(mode=0o755, exist_ok=True)
        end = f"{folder}/{manifest.NAME}"
        with suppress(FileNotFoundError):  # of another run, or a damaged one
            system.delete_file(end)

        def send(name: str) -> None:
            if self._sent(system, path / name, f"{folder}/{name}") != files[name]:
                raise OSError(f"{path / name} is not what was written")
            with system.open_input_stream(f"{folder}/{name}") as file:
                if _summed(file, each=self._count) != files[name]:
                    raise OSError(f"{folder}/{name} is not what was sent")

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(send, files))
        own = self._sent(system, path / manifest.NAME, end)
        with system.open_input_stream(end) as file:
            if _summed(file, each=self._count) != own:
                raise OSError(f"{end} is not what was sent")
        self._prune(system, root, cast(int, _step(path.name)))

    def _sent(self, system: Any, source: Path, target: str) -> dict[str, Any]:  # noqa: ANN401  pyarrow has no types
        """Write a file there; its size and checksum here."""
        with open_regular(source, link=False) as file:
            if "://" in self.place:
                with system.open_output_stream(target) as out:
                    return _summed(file, out, each=self._count)
            # No group may write it, whatever the umask; and it is on the disk before the manifest is.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(target, flags, 0o644), "wb") as out:
                found = _summed(file, out, each=self._count)
                out.flush()
                os.fsync(out.fileno())
                return found

    def _prune(self, system: Any, root: str, newest: int) -> None:  # noqa: ANN401  pyarrow has no types
        """The newest `keep` stay, and nothing that is newer than this one is touched."""
        from pyarrow.fs import FileSelector  # noqa: PLC0415

        complete = [step for step in self._steps() if step <= newest]
        kept = {*complete[-self.keep :], newest}
        for one in system.get_file_info(FileSelector(root)):
            step = _step(one.path)
            if step is not None and step < newest and step not in kept:
                with suppress(FileNotFoundError):
                    system.delete_file(f"{one.path}/{manifest.NAME}")  # first: from here on it is none
                system.delete_dir(one.path)

    def _system(self) -> tuple[Any, str]:
        """By pyarrow, and where in it."""
        from pyarrow.fs import LocalFileSystem  # noqa: PLC0415

        scheme, _, rest = self.place.partition("://")
        return (remote.own_system(scheme).fs, rest) if rest else (LocalFileSystem(), self.place.rstrip("/"))


def _step(path: str) -> int | None:
    name = path.rstrip("/").rpartition("/")[2].removeprefix("step-")
    return int(name) if name.isdecimal() and path.rstrip("/").endswith(f"step-{name}") and len(name) < 19 else None


def _summed(
    file: BinaryIO,
    out: Any = None,  # noqa: ANN401  a file of any kind
    most: int | None = None,
    each: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Size and checksum of what it holds, which goes to `out` on the way. It is not read beyond `most`."""
    checksum, size = hashlib.sha256(), 0
    while (most is None or size <= most) and (block := file.read(_BLOCK)):
        checksum.update(block)
        size += len(block)
        if out is not None:
            out.write(block)
        each(len(block))
    return {"bytes": size, "sha256": checksum.hexdigest()}


def _fetched(system: Any, source: str, target: Path, most: int) -> dict[str, Any]:  # noqa: ANN401  pyarrow has no types
    """Bring a file to this disk, and little more of it than that; its size and checksum."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with system.open_input_stream(source) as file, os.fdopen(os.open(target, flags, 0o644), "wb") as out:
        found = _summed(file, out, most)
        out.flush()
        os.fsync(out.fileno())
    return found
