"""checkpoint.mirror: rank 0 copies each checkpoint to a bucket or another folder during training; all ranks fetch one.

Every byte is read back from there and compared with the manifest's checksums before the manifest follows: what has a
manifest is complete. A copy that fails is tried again, and never ends the run.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from dray.contract import exit_codes, findings
from dray.contract.files import open_regular
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.train.checkpoint import manifest
from dray.train.collectives import on_all, on_rank_0, placed
from dray.train.data import remote
from dray.train.errors import described, say
from dray.train.runtime.heartbeat import BEAT_S, Moved

if TYPE_CHECKING:
    from dray.train.loop.metrics import Metrics

RETRY_S = 60.0
_WHAT = "the mirror of the checkpoints"
_SENT_AT_ONCE, _FETCHED_AT_ONCE = 16, 4  # files at once: rank 0 sends, and each rank fetches
_BLOCK = 1 << 22
Files = dict[str, dict[str, Any]]
"""Size and checksum of each, as a manifest has them."""


class Place:
    """A bucket or a folder: `name` is s3://, gs:// or a path. `moved` hears how many bytes a copy has gone on by."""

    def __init__(self, name: str, moved: Callable[[int], None]) -> None:
        self.name, self._moved, self._remote = name, moved, "://" in name

    def steps(self) -> list[int]:
        """The steps of the complete copies."""
        from pyarrow.fs import FileSelector, FileType  # noqa: PLC0415  a run without a mirror does without

        system, root = self._system()
        within = system.get_file_info(FileSelector(root, allow_not_found=True))
        if not within and self._remote:
            (bucket,) = system.get_file_info([root.partition("/")[0]])
            if bucket.type == FileType.NotFound:
                raise FileNotFoundError(bucket.path)
        folders = {step: one.path for one in within if (step := _step_of(one.path)) is not None}
        ends = system.get_file_info([f"{folder}/{manifest.NAME}" for folder in folders.values()])
        return sorted(step for step, end in zip(folders, ends, strict=True) if end.type == FileType.File)

    def copy(self, path: Path) -> None:
        """Copy this checkpoint. Its manifest is deleted first and written last: between, the copy is incomplete."""
        found = manifest.read(path)
        if "trouble" in found:
            raise OSError(found["trouble"])
        files = found["files"]
        system, root = self._system()
        folder = f"{root}/{path.name}"
        if not self._remote:
            Path(root).mkdir(mode=0o755, parents=True, exist_ok=True)
            Path(folder).mkdir(mode=0o755, exist_ok=True)
        with suppress(FileNotFoundError):  # of another run, or a damaged one
            system.delete_file(f"{folder}/{manifest.NAME}")

        def send_once(name: str) -> None:
            sent = self._sent(system, path / name, f"{folder}/{name}")
            if name in files and sent != files[name]:
                raise OSError(f"{path / name} is not what was written")
            with system.open_input_stream(f"{folder}/{name}") as file:
                if self._summed(file) != sent:
                    raise OSError(f"{folder}/{name} is not what was sent")

        def send(name: str) -> None:
            try:
                send_once(name)
            except OSError:  # a connection that is reset once in 800 GB does not cost the copy
                send_once(name)

        with ThreadPoolExecutor(_SENT_AT_ONCE) as pool:
            list(pool.map(send, files))
        send(manifest.NAME)

    def fetch_manifest(self, part: Path, name: str) -> dict[str, Any]:
        """Into this folder; the manifest, or `trouble`."""
        system, root = self._system()
        if not self._remote:
            manifest.require_own(Path(root, name))
        self._fetched(system, f"{root}/{name}/{manifest.NAME}", part / manifest.NAME, manifest.LIMIT)
        return manifest.read(part)

    def fetch(self, part: Path, name: str, files: Files, names: Iterable[str]) -> str:
        """Fetch these files; return why one of them differs from what was written."""
        system, root = self._system()

        def fetch(one: str) -> str:
            (part / one).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            own = self._fetched(system, f"{root}/{name}/{one}", part / one, files[one]["bytes"])
            return "" if own == files[one] else f"{one} is not what was written"

        with ThreadPoolExecutor(_FETCHED_AT_ONCE) as pool:
            return next(filter(None, pool.map(fetch, names)), "")

    def prune(self, newest: int, keep: int) -> None:
        """Delete all but the newest `keep` copies; leave any newer than this one."""
        from pyarrow.fs import FileSelector  # noqa: PLC0415

        system, root = self._system()
        complete = [step for step in self.steps() if step <= newest]
        kept = {*complete[-keep:], newest}
        for one in system.get_file_info(FileSelector(root)):
            step = _step_of(one.path)
            if step is not None and step < newest and step not in kept:
                with suppress(FileNotFoundError):
                    system.delete_file(f"{one.path}/{manifest.NAME}")  # first: from here on it is none
                system.delete_dir(one.path)

    def _sent(self, system: Any, source: Path, target: str) -> dict[str, Any]:  # noqa: ANN401  pyarrow has no types
        """Write a file there, which has its name once it is whole; its size and checksum here."""
        with open_regular(source, link=False) as file:
            if self._remote:
                with system.open_output_stream(target) as out:
                    return self._summed(file, out)
            part = Path(f"{target}.part")
            part.unlink(missing_ok=True)  # of a run that was killed
            try:
                with manifest.new(part) as out:
                    sent = self._summed(file, out)
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
            return sent

    def _fetched(self, system: Any, source: str, target: Path, most: int) -> dict[str, Any]:  # noqa: ANN401
        """Bring a file to this disk, and little more of it than that; its size and checksum."""
        with system.open_input_stream(source) as file, manifest.new(target) as out:
            return self._summed(file, out, most)

    def _summed(
        self,
        file: BinaryIO,
        out: Any = None,  # noqa: ANN401  a file of any kind
        most: int | None = None,
    ) -> dict[str, Any]:
        """Size and checksum of what it holds, which goes to `out` on the way. It is not read beyond `most`."""
        checksum, size = hashlib.sha256(), 0
        while (most is None or size <= most) and (block := file.read(_BLOCK)):
            checksum.update(block)
            size += len(block)
            if out is not None:
                out.write(block)
            self._moved(len(block))
        return {"bytes": size, "sha256": checksum.hexdigest()}

    def _system(self) -> tuple[Any, str]:
        """By pyarrow, and where in it."""
        from pyarrow.fs import LocalFileSystem  # noqa: PLC0415

        scheme, _, rest = self.name.partition("://")
        return (remote.own_system(scheme).fs, rest) if rest else (LocalFileSystem(), self.name.rstrip("/"))


class Mirror:
    """The mirror of one run. Rank 0 begins, puts and settles; all ranks fetch. `place` is s3://, gs:// or a folder."""

    def __init__(self, place: str, metrics: Metrics, *, keep: int) -> None:
        self.place, self.metrics, self.keep = place, metrics, keep
        self.copying: int | None = None  # retention leaves it in the checkpoint folder
        self.trouble = ""
        self.known: list[int] = []  # the steps that were there at the start
        self._next: Path | None = None
        self._tried = False
        self._changed = Condition()
        self._thread: Thread | None = None
        self._moved = Moved()
        self._target = Place(place, self._moved.count)

    def begin(self, folder: Path, *, instead: bool) -> list[int]:
        """The steps that are complete in the mirror. If it does not answer, the run ends unless `instead` is true."""
        if "://" not in self.place and Path(self.place).exists():
            if Path(self.place).samefile(folder):
                raise ConfigError(
                    "checkpoint.mirror is the checkpoint folder itself",
                    wanted="a place that survives the loss of this folder",
                    found=self.place,
                    fix="checkpoint.mirror=ANOTHER",
                )
            manifest.require_own(Path(self.place))
        try:
            with remote.reading(self.place, _WHAT):
                self.known = self._target.steps()
        except DrayError as failed:
            self._warned(failed, instead=instead)
        return self.known

    def fetch(self, part: Path, path: Path, room: Callable[[int], None], *, instead: bool) -> str:
        """Fetch this checkpoint into the empty folder `part`, then rename it; return why it failed, or empty.

        All ranks together, each its share of the files. `room` is asked for so many bytes, on rank 0.
        """

        def begin() -> dict[str, Any]:
            found = self._target.fetch_manifest(part, path.name)
            if "trouble" not in found:
                room(sum(one["bytes"] for one in found["files"].values()))
            return found

        def end(left: list[str]) -> str:
            trouble = self._fetched(lambda: self._target.fetch(part, path.name, files, left), instead=instead)
            if not trouble:
                manifest.sync(part)
                part.rename(path)
                manifest.sync(path.parent)
            return str(trouble)

        begun = on_rank_0(lambda: self._fetched(begin, instead=instead))
        if isinstance(begun, str) or "trouble" in begun:
            return begun if isinstance(begun, str) else str(begun["trouble"])
        files, (rank, world) = begun["files"], placed()
        own = [*files][rank::world]
        return str(on_all(lambda: self._left(part, path.name, files, own), operator.add, end))

    def _fetched(self, do: Callable[[], Any], *, instead: bool) -> Any:  # noqa: ANN401  what `do` returns
        """On rank 0; why not, where the mirror does not answer."""
        try:
            with remote.reading(self.place, _WHAT):
                return do()
        except UnfitError:  # this disk
            raise
        except DrayError as failed:
            return self._warned(failed, instead=instead)

    def _left(self, part: Path, name: str, files: Files, own: list[str]) -> list[str]:
        """Fetch these; those that rank 0 has to, since this node may not see the mirror."""
        with suppress(DrayError), remote.reading(self.place, _WHAT):
            if not self._target.fetch(part, name, files, own):
                return []
        for one in own:
            (part / one).unlink(missing_ok=True)
        return own

    def _warned(self, failed: DrayError, *, instead: bool) -> str:
        finding = failed.finding
        if not instead:  # to begin from nothing is not what was meant
            again = exit_codes.RETRY if finding.code == exit_codes.FAILED else finding.code
            raise findings.error(finding._replace(code=again))
        self.trouble = f"{finding.problem}: {finding.found}"
        say(f"WARNING: {self.trouble}")
        return self.trouble

    def put(self, path: Path) -> None:
        """Begin to copy this checkpoint. It replaces an older one that still waits."""
        with self._changed:
            self._next, self._tried = path, False
            if self._thread is None:
                self._thread = Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until the newest checkpoint is copied, or two tries have failed."""
        for _ in range(2):
            with self._changed:
                self._tried = False
                self._changed.notify_all()
                while not self._changed.wait_for(
                    lambda: self.copying is None and (self._next is None or self._tried), BEAT_S
                ):
                    self._moved.beat()

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._tried:
                    self._changed.wait_for(lambda: not self._tried, RETRY_S)
                else:
                    self._changed.wait_for(lambda: self._next is not None)
                path = cast(Path, self._next)
                step = cast(int, _step_of(path.name))
                self._next, self._tried, self.copying = None, False, step
            trouble = self._copied(path, step)
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

    def _copied(self, path: Path, step: int) -> str:
        """Why it is not there; empty where it is."""
        try:
            with remote.reading(self.place, _WHAT, "written"):
                self._target.copy(path)
                self._target.prune(step, self.keep)
        except Exception as error:  # whatever a store answers: the run goes on
            text = f"{error.problem}: {error.finding.found}" if isinstance(error, DrayError) else described(error)
            return " ".join(text.split())[:300]
        return ""


def _step_of(path: str) -> int | None:
    """The step in a folder's name."""
    name = path.rstrip("/").rpartition("/")[2].removeprefix("step-")
    return int(name) if name.isdecimal() and path.rstrip("/").endswith(f"step-{name}") and len(name) < 19 else None
