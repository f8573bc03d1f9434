"""Compiled code, kept in the run folder: the next attempt, such as a requeued job, does not compile again.

It is Inductor's and Triton's own caches with their tuning, as one archive: torch.compiler.save_cache_artifacts leaves
out what the C++ compiler made (seen with torch 2.13). To use an archive is to run its code. So it is in no
checkpoint.folder, which may have been copied from somebody else, and it is used only as this user wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch

from dray.contract.files import open_regular, open_to_others
from dray.train import ranks
from dray.train.checkpoint import manifest
from dray.train.collectives import barrier
from dray.train.config import Config
from dray.train.errors import say

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_ARCHIVE, _VERSION = "caches.tar", 1


class Compiled:
    """The compiled code of a run. Each node's first rank fills the node's caches; rank 0 saves its own."""

    def __init__(self, config: Config, device: torch.device) -> None:
        named = {name: Path(os.environ.get(name, "/")) for name in _CACHES}
        # Caches elsewhere are the user's own: they stay by themselves, and hold what other runs compiled.
        self._caches = {name: path for name, path in named.items() if path.is_relative_to(config.scratch)}
        self._on = config.train.compile is True and bool(self._caches)
        self.folder = Path(config.compiled) / _key(config, device)
        self._kept: set[Path] = set()
        self.nanoseconds = self._since = self._depth = 0
        if config.train.compile is True or "torch._dynamo" in sys.modules:
            self._listen()

    def _listen(self) -> None:
        """Sum up the time in which torch compiles: the forward pass at once, the backward one when it is first taken.

        Within one another they count once; what torch hands to its callbacks differs between its versions.
        """
        from torch._dynamo import callback  # noqa: PLC0415  it imports all that compiles

        def begin(*_: object) -> None:
            self._since = self._since if self._depth else time.monotonic_ns()
            self._depth += 1

        def end(*_: object) -> None:
            self._depth -= 1
            self.nanoseconds += 0 if self._depth else time.monotonic_ns() - self._since

        callback.on_compile_start(begin)
        callback.on_compile_end(end)

    def load(self) -> None:
        """Fill the caches; all ranks call it before anything is compiled."""
        if not self._on:
            return
        if ranks.local_rank() == 0 and self.folder.exists():
            if trouble := self._trouble():
                say(f"compiled code of an earlier attempt is not used, and this attempt compiles again: {trouble}")
            else:
                say(f"compiled code of an earlier attempt is used: {self.folder}")
        barrier()
        self._kept = set(self._files())

    def _trouble(self) -> str:
        """Fill the caches; else why not."""
        for folder in (self.folder.parent.parent, self.folder.parent, self.folder):
            if found := open_to_others(folder, folder=True):
                return f"{folder} is {found}"
        path = self.folder / _ARCHIVE
        if found := open_to_others(path) or open_to_others(self.folder / manifest.NAME):
            return f"in {self.folder} is {found}"
        described = manifest.read(self.folder)
        try:
            with open_regular(path, link=False) as file:
                if described.get("version") != _VERSION or described["files"] != {_ARCHIVE: manifest.of_file(file)}:
                    return f"{path} does not match {manifest.NAME}"
                file.seek(0)
                with tarfile.open(fileobj=file, mode="r:") as archive:
                    for member in archive:
                        name, _, inner = member.name.partition("/")
                        content = archive.extractfile(member) if member.isreg() else None
                        if content and name in self._caches and ".." not in Path(inner).parts and inner[:1] != "/":
                            _restore(content, self._caches[name] / inner, member)
        except (OSError, tarfile.TarError) as error:
            return f"{path}: {error}"
        return ""

    def keep(self) -> None:
        """Save the caches if they have new files. A full disk does not end the run."""
        found = {} if not self._on or ranks.rank() else self._files()
        if found.keys() <= self._kept:
            return
        self._kept = set(found)
        say(f"compiled code is kept for the next attempt: {len(found):,} files in {self.folder}")
        part = self.folder.with_name(f"{self.folder.name}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.parent.mkdir(mode=0o755, exist_ok=True)  # by itself: parents=True gives it the umask's mode
            part.mkdir(mode=0o755)
            with (part / _ARCHIVE).open("xb") as file:
                os.fchmod(file.fileno(), 0o644)  # no group may write it, whatever the umask
                with tarfile.open(fileobj=file, mode="w:") as archive:
                    for path, name in found.items():
                        archive.add(path, name, recursive=False)
                file.flush()
                os.fsync(file.fileno())
            manifest.write(part, {"version": _VERSION, "files": {_ARCHIVE: manifest.described(part / _ARCHIVE)}})
            shutil.rmtree(self.folder, ignore_errors=True)
            part.rename(self.folder)
        except OSError as error:
            say(f"compiled code is not kept: {error}")

    def _files(self) -> dict[Path, str]:
        return dict(self._walk())

    def _walk(self) -> Iterator[tuple[Path, str]]:
        for name, cache in self._caches.items():
            for path in sorted(cache.rglob("*")):
                with suppress(OSError):  # a temporary one of another rank
                    if path.is_file() and not path.is_symlink() and path.suffix not in (".lock", ".tmp"):
                        yield path, f"{name}/{path.relative_to(cache).as_posix()}"


def _restore(content: IO[bytes], path: Path, member: tarfile.TarInfo) -> None:
    """One file; tarfile's own filter that keeps members inside needs Python 3.11.4."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        shutil.copyfileobj(content, file)
        os.fchmod(file.fileno(), member.mode & 0o755)
    os.utime(path, (member.mtime, member.mtime))


def _key(config: Config, device: torch.device) -> str:
    """Image, devices and recipe. Inductor compiles C++ for this very CPU, beside a GPU too."""
    gpu = "" if device.type == "cpu" else (torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    cpu = sorted({line for line in lines if line.lower().startswith(("flags", "features", "model name"))})
    parts: list[object] = [
        config.image_sha256,
        torch.__version__,
        sys.version,
        platform.machine(),
        cpu,
        gpu,
        config.recipe,
    ]
    parts += [config.per_device, ranks.local_world(), _VERSION]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
