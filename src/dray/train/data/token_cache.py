"""Documents as tokens in a file that is mapped into memory: made once on a node, and atomic.

The folder's name is the fingerprint of all that decides its content. Other nodes and runs may make the same beside this
one. From a shared disk each node copies the tokens to its own, where it has one: samples are read in any order.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dray.contract import exit_codes, findings
from dray.contract.files import open_to_others, write_atomic
from dray.contract.findings import ConfigError, DrayError, Finding
from dray.train import ranks
from dray.train.collectives import all_gather_json, barrier, broadcast_json
from dray.train.errors import say
from dray.train.runtime.heartbeat import heartbeat

LABEL, LAST = 1 << 31, 1 << 30
"""Marks beside a token: it is a label; a document ends with it."""
IDS = LAST - 1
MANIFEST = "manifest.json"  # also `dray clean tokens` reads it; it was modified when the tokens were last used

_VERSION = 3
_FILES = ("ids", "starts")
_BATCH = 1024  # documents
_ABANDONED = 3600  # seconds without a write
_SIGN, _SILENT, _LOOK = 5.0, 60.0, 0.5  # seconds from sign to sign, after which nobody is there, and between looks
_DISK = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"}
_MEMORY = {"ramfs", "tmpfs"}
_LAYERED = {"aufs", "overlay"}  # a container's own; what is below it may be any
_ESCAPED = re.compile(r"\\([0-7]{3})")
_ROOM = 2  # so many times the copy's size has to be free: others use that disk too


@dataclass(frozen=True)
class Tokens:
    """All tokens in a row, and where each document begins; the last start is the end."""

    ids: NDArray[np.integer]
    starts: NDArray[np.uint64]
    content: str = field(default="", kw_only=True)
    """SHA-256 of the whole files that these are of."""

    @property
    def total(self) -> int:
        """How many they are."""
        return len(self.ids)

    def part(self, first: int, last: int) -> Tokens:
        """Some of the documents."""
        begin, end = int(self.starts[first]), int(self.starts[last])
        starts = self.starts[first : last + 1] - self.starts[first]
        return Tokens(self.ids[begin:end], starts, content=self.content)

    def short(self, most: int) -> Tokens:
        """At most this many of the tokens; 0 is all."""
        return Tokens(self.ids[:most], self.starts, content=self.content) if most else self

    def slice(self, start: int, length: int) -> NDArray[np.int64]:
        """`length` tokens from there on; after the last comes the first."""
        ids = self.ids[start : start + length]
        while len(ids) < length:
            ids = np.concatenate([ids, self.ids[: length - len(ids)]])
        return ids.astype(np.int64)


def fingerprint(*parts: object) -> str:
    """The hash of everything that decides the tokens: files, columns, the tokenizer."""
    return hashlib.sha256(json.dumps([_VERSION, *map(str, parts)]).encode()).hexdigest()[:24]


def cached(
    cache: Path,
    name: str,
    documents: Callable[[], Iterable[str]],
    encode: Callable[[list[str]], list[int]],
    *,
    end: int,
    vocabulary: int,
    marked: bool = False,
    dataset: str = "",
    scratch: str = "",
) -> Tokens:
    """The tokens with this fingerprint, made now if missing; with `marked`, documents end at LAST.

    `dataset` is for `dray clean tokens`, and `scratch` is the attempt's folder on the node.

    The first rank of each node makes or checks them and the others wait, whether the disk has locks or not. On a disk
    that rank 0 has too, it makes them for all, and the others check them.
    """
    folder = cache / name
    near = Path(scratch, "tokens", name) if is_own(scratch) else folder
    write = partial(_write, dataset, documents, encode, end=end, vocabulary=vocabulary, marked=marked)

    def prepare() -> None:
        if not folder.is_dir():
            _make(folder, write)
        _check(folder)
        if near != folder:
            _copy(folder, near)
            if near.exists():
                _check(near)

    leads = ranks.local_rank() == 0
    waits = _has_rank_0s_disk(cache) and not folder.is_dir()
    for turn in (False, True):
        failed = _failed(cache, prepare) if leads and waits is turn else None
        for finding in filter(None, all_gather_json(failed)):
            raise findings.error(finding)
    _check_same(folder)
    return _open(near if near.exists() else folder)


def is_own(scratch: str) -> bool:
    """Whether the attempt still runs: after it, anybody may create a folder of this name."""
    try:
        return bool(scratch) and not open_to_others(scratch, folder=True)
    except FileNotFoundError:
        return False


def _failed(cache: Path, prepare: Callable[[], None]) -> dict[str, Any] | None:
    try:
        prepare()
    except DrayError as error:
        return error.finding._asdict()
    except Exception as error:
        traceback.print_exc()
        problem = f"tokenizing failed: {type(error).__name__}: {error}"
        return Finding(problem, where=str(cache), code=exit_codes.FAILED)._asdict()
    return None


def _has_rank_0s_disk(cache: Path) -> bool:
    """Whether this is another rank, and sees a file that rank 0 has made there now."""
    first, probe = ranks.rank() == 0, cache / f".rank-0-{secrets.token_hex(8)}"
    if first:
        with suppress(OSError):  # what is wrong with the disk, making tokens says
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe.touch(exist_ok=False)
    seen = (cache / broadcast_json(probe.name)).exists()
    barrier()
    if first:
        with suppress(OSError):
            probe.unlink()
    return seen and not first


def _make(folder: Path, write: Callable[[Path], None]) -> None:
    """Write into a temporary folder, then rename it. Another node or run may write the same bytes."""
    cache = folder.parent
    with suppress(FileExistsError):  # by a file too, which `_require_private` refuses
        cache.mkdir(mode=0o700, parents=True)
    _require_private(cache)
    if _made_by_another(folder):
        return
    for part, written in _parts(folder).items():  # of a killed process: one that is alive writes all the time
        if time.time() - written > _ABANDONED:
            shutil.rmtree(part, ignore_errors=True)
    part = folder.with_name(f"{folder.name}.part-{secrets.token_hex(8)}")
    try:
        write(part)
        part.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and folder.is_dir():
            return  # another node's or run's are there now
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.rmtree(part, ignore_errors=True)
        raise DrayError(
            "the disk is full: it has no room for the tokens",
            wanted=f"more room in {cache}",
            found=f"{shutil.disk_usage(cache).free / 1e6:.0f} MB free, after dray removed the incomplete tokens",
            fix="set data.cache_dir to a place with more room",
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _made_by_another(folder: Path) -> bool:
    """Whether another run makes these tokens, as long as it is seen at work; then they are there now.

    No lock is needed: where two begin at once both make them, and the one that is ready first stays.
    """
    told = False
    while (silent := _silent(folder)) is not None and silent < _SILENT:
        if not told:
            say(f"another run makes these tokens; this one waits for it: {folder}")
        told = True
        heartbeat.beat()
        time.sleep(_LOOK)
    return folder.is_dir()


def _silent(folder: Path) -> float | None:
    """Seconds since the last sign of who makes these tokens; none where nobody does. By the clock of the disk."""
    parts = _parts(folder)
    if not parts:
        return None
    with tempfile.TemporaryFile(dir=folder.parent) as now:
        return max(0.0, os.fstat(now.fileno()).st_mtime - max(parts.values()))


def _parts(folder: Path) -> dict[Path, float]:
    """The temporary folders of these tokens, and when each was last written."""
    found = {}
    for part in folder.parent.glob(f"{folder.name}.part-*"):
        with suppress(OSError):
            found[part] = max(path.stat().st_mtime for path in (part, *part.iterdir()))
    return found


def _write(
    dataset: str,
    documents: Callable[[], Iterable[str]],
    encode: Callable[[list[str]], list[int]],
    part: Path,
    *,
    end: int,
    vocabulary: int,
    marked: bool,
) -> None:
    part.mkdir(mode=0o700)
    dtype = np.uint16 if vocabulary <= 1 << 16 and not marked else np.uint32
    total, began, shown, alive = 0, time.monotonic(), time.monotonic(), time.monotonic()
    rest = iter(documents())
    with (part / "ids").open("wb") as file_of_ids, (part / "starts").open("wb") as starts:
        starts.write(np.zeros(1, np.uint64).tobytes())
        while batch := list(islice(rest, _BATCH)):
            heartbeat.beat()
            array = np.asarray(encode(batch), dtype=np.int64)
            ids = array & IDS
            if array.size and int(ids.max()) >= vocabulary:
                raise ConfigError(
                    "the tokenizer has a token that the model lacks",
                    wanted=f"ids below {vocabulary}",
                    found=str(int(ids.max())),
                    fix="set model.tokenizer to the one that belongs to the model",
                )
            file_of_ids.write(array.astype(dtype).tobytes())
            ends = np.flatnonzero(array & LAST if marked else array == end)
            starts.write((ends + total + 1).astype(np.uint64).tobytes())
            total += len(array)
            if time.monotonic() - alive > _SIGN:
                alive = time.monotonic()
                os.utime(part)  # another disk client sees what was written only later
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                say(f"{total:,} tokens made, {total / (shown - began):,.0f} a second")
        for file in (file_of_ids, starts):
            file.flush()
            os.fsync(file.fileno())
    about = {"kind": np.dtype(dtype).name, "sha256": _sums(part), "dataset": dataset}
    write_atomic(part / MANIFEST, json.dumps(about), mode=0o600)


def _sums(folder: Path) -> dict[str, str]:
    """The checksum of each of its files."""
    found = {}
    for name in _FILES:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _require_private(folder: Path) -> None:
    """Refuse a folder in which another user may write: planted tokens would change what the model learns."""
    if trouble := open_to_others(folder, folder=True):
        raise ConfigError(
            "the token cache is open to other users",
            where=folder,
            wanted=f"a folder of user {os.geteuid()} that no other user may write to",
            found=trouble,
            fix=f"if the folder is yours: chmod 700 '{folder}'; else set data.cache_dir to a folder of yours",
        )


def _check(folder: Path) -> None:
    """That these tokens are this user's, and every byte is as it was written."""
    for one in (folder.parent, folder):
        _require_private(one)
    wanted: object = "its manifest and two files"
    found: object
    try:
        with suppress(OSError):  # a disk that can only be read
            os.utime(folder / MANIFEST)
        wanted = _manifest(folder)["sha256"]
        found = _sums(folder)
    except (OSError, ValueError, LookupError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    if found != wanted:
        raise DrayError(
            "tokens in the cache are damaged", where=folder, wanted=wanted, found=found, fix=f"rm -r '{folder}'"
        )


def _check_same(folder: Path) -> None:
    """That all nodes have the same tokens, of which each may have made its own."""
    each = all_gather_json(_manifest(folder)["sha256"])
    if other := [rank for rank, sums in enumerate(each) if sums != each[0]]:
        raise ConfigError(
            "the nodes made different tokens from the same rows",
            where=folder,
            wanted="the same tokens as on rank 0",
            found=f"other tokens on {len(other)} of {len(each)} ranks, first on rank {other[0]}",
            fix="make data.map return the same for the same row on every node (no random numbers, no order of a set), "
            "then remove that folder on each node",
        )


def _manifest(folder: Path) -> Any:  # noqa: ANN401  any JSON value
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def _open(folder: Path) -> Tokens:
    about = _manifest(folder)
    dtype = np.dtype(about["kind"])
    content = hashlib.sha256(json.dumps(about["sha256"], sort_keys=True).encode()).hexdigest()
    starts = np.fromfile(folder / "starts", dtype=np.uint64)
    size = (folder / "ids").stat().st_size
    ids: NDArray[np.integer] = np.memmap(folder / "ids", dtype=dtype, mode="r") if size else np.zeros(0, dtype)
    return Tokens(ids, starts, content=content)


def _copy(folder: Path, copy: Path) -> None:
    """Copy the tokens to this attempt's folder on the node's own disk, if that is faster."""
    source, target = file_system(folder), file_system(copy)
    if copy.exists() or source in _DISK | _MEMORY | _LAYERED or target not in _DISK:
        return
    size, part = sum(path.stat().st_size for path in folder.iterdir()), copy.with_suffix(".part")
    began = time.monotonic()
    stays = f"tokens stay on {source}, and are not copied to {copy.parent}"
    try:
        copy.parent.mkdir(mode=0o700, exist_ok=True)
        part.mkdir(mode=0o700)
        if (free := shutil.disk_usage(part).free) < _ROOM * size:
            say(f"{stays}: {size / 1e9:.1f} GB of tokens, and only {free / 1e9:.1f} GB free")
            return
        for file in folder.iterdir():
            shutil.copyfile(file, part / file.name)
        part.rename(copy)
    except OSError as error:
        say(f"{stays}: {error}")
        return
    finally:
        shutil.rmtree(part, ignore_errors=True)
    seconds = time.monotonic() - began
    say(f"tokens copied from {source} to this node's {target}: {size / 1e9:.1f} GB in {seconds:.0f} s")


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the folder's file system, as mount(8) names it; empty if unknown."""
    found, place = "", folder.resolve()
    longest = -1
    for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        where, _, what = line.partition(" - ")
        point = Path(_ESCAPED.sub(lambda code: chr(int(code[1], 8)), where.split()[4]))
        if place.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = what.split()[0], len(point.parts)
    return found
