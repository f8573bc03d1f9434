"""A bucket or a folder that holds copies of checkpoints. What is sent is read back; what is fetched is checked."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from dray.contract.files import open_regular
from dray.train import manifest
from dray.train.data import remote

_AT_ONCE = 4  # files
_BLOCK = 1 << 22
Files = dict[str, dict[str, Any]]
"""Size and checksum of each, as a manifest has them."""


class Place:
    """`name` is s3://, gs:// or a folder; `moved` hears how many bytes a copy has gone on by."""

    def __init__(self, name: str, moved: Callable[[int], None]) -> None:
        self.name, self._moved = name, moved

    def steps(self) -> list[int]:
        """The steps of the complete copies."""
        from pyarrow.fs import FileSelector, FileType  # noqa: PLC0415  a run without a mirror does without

        system, root = self._system()
        within = system.get_file_info(FileSelector(root, allow_not_found=True))
        if not within and "://" in self.name:
            (bucket,) = system.get_file_info([root.partition("/")[0]])
            if bucket.type == FileType.NotFound:
                raise FileNotFoundError(bucket.path)
        folders = {step: one.path for one in within if (step := step_of(one.path)) is not None}
        ends = system.get_file_info([f"{folder}/{manifest.NAME}" for folder in folders.values()])
        return sorted(step for step, end in zip(folders, ends, strict=True) if end.type == FileType.File)

    def begin(self, path: Path) -> None:
        """Delete the copy's manifest: the copy is incomplete from here on."""
        system, root = self._system()
        if "://" not in self.name:
            Path(root).mkdir(mode=0o755, parents=True, exist_ok=True)
            Path(root, path.name).mkdir(mode=0o755, exist_ok=True)
        with suppress(FileNotFoundError):  # of another run, or a damaged one
            system.delete_file(f"{root}/{path.name}/{manifest.NAME}")

    def send(self, path: Path, files: Files, names: Iterable[str]) -> None:
        """Copy these of a checkpoint's files, as its manifest describes them."""
        system, root = self._system()

        def send(name: str) -> None:
            target = f"{root}/{path.name}/{name}"
            if self._sent(system, path / name, target) != files[name]:
                raise OSError(f"{path / name} is not what was written")
            self._require(system, target, files[name])

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(send, names))

    def missing(self, path: Path, files: Files) -> list[str]:
        """The files that the copy lacks, by their sizes."""
        from pyarrow.fs import FileSelector  # noqa: PLC0415

        system, root = self._system()
        found = system.get_file_info(FileSelector(f"{root}/{path.name}", allow_not_found=True, recursive=True))
        sizes = {one.path.partition(f"/{path.name}/")[2]: one.size for one in found}
        return [name for name, one in files.items() if sizes.get(name) != one["bytes"]]

    def complete(self, path: Path) -> None:
        """The manifest, which is last."""
        system, root = self._system()
        end = f"{root}/{path.name}/{manifest.NAME}"
        self._require(system, end, self._sent(system, path / manifest.NAME, end))

    def fetch_manifest(self, part: Path, name: str) -> dict[str, Any]:
        """Into this folder; the manifest, or `trouble`."""
        system, root = self._system()
        if "://" not in self.name:
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

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return next(filter(None, pool.map(fetch, names)), "")

    def prune(self, newest: int, keep: int) -> None:
        """Delete all but the newest `keep` copies; leave any newer than this one."""
        from pyarrow.fs import FileSelector  # noqa: PLC0415

        system, root = self._system()
        complete = [step for step in self.steps() if step <= newest]
        kept = {*complete[-keep:], newest}
        for one in system.get_file_info(FileSelector(root)):
            step = step_of(one.path)
            if step is not None and step < newest and step not in kept:
                with suppress(FileNotFoundError):
                    system.delete_file(f"{one.path}/{manifest.NAME}")  # first: from here on it is none
                system.delete_dir(one.path)

    def _sent(self, system: Any, source: Path, target: str) -> dict[str, Any]:  # noqa: ANN401  pyarrow has no types
        """Write a file there; its size and checksum here."""
        with open_regular(source, link=False) as file:
            if "://" in self.name:
                with system.open_output_stream(target) as out:
                    return self._summed(file, out)
            # No group may write it, whatever the umask; and it is on the disk before the manifest is.
            # A node that was silent may write one again that is complete by then: it has its name once it is whole.
            part = Path(f"{target}.part-{secrets.token_hex(4)}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(part, flags, 0o644), "wb") as out:
                    found = self._summed(file, out)
                    out.flush()
                    os.fsync(out.fileno())
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
            return found

    def _require(self, system: Any, target: str, own: dict[str, Any]) -> None:  # noqa: ANN401
        with system.open_input_stream(target) as file:
            if self._summed(file) != own:
                raise OSError(f"{target} is not what was sent")

    def _fetched(self, system: Any, source: str, target: Path, most: int) -> dict[str, Any]:  # noqa: ANN401
        """Bring a file to this disk, and little more of it than that; its size and checksum."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with system.open_input_stream(source) as file, os.fdopen(os.open(target, flags, 0o644), "wb") as out:
            found = self._summed(file, out, most)
            out.flush()
            os.fsync(out.fileno())
        return found

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


def step_of(path: str) -> int | None:
    """The step in a folder's name."""
    name = path.rstrip("/").rpartition("/")[2].removeprefix("step-")
    return int(name) if name.isdecimal() and path.rstrip("/").endswith(f"step-{name}") and len(name) < 19 else None
