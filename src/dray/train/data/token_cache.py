"""Documents as tokens in a file that is mapped into memory: made once on a node, renamed when whole, and checked.

The folder's name is the fingerprint of all that decides its content.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from dray.contract.files import open_to_others, write_atomic
from dray.contract.findings import ConfigError, DrayError
from dray.train import ranks
from dray.train.collectives import all_gather_json, barrier, broadcast_json, on_all
from dray.train.errors import say
from dray.train.runtime.heartbeat import heartbeat

LABEL, LAST = 1 << 31, 1 << 30
"""Marks beside a token: it is a label; a document ends with it."""
IDS = LAST - 1
MANIFEST = "manifest.json"  # `dray clean tokens` reads it too; its modification time is that of the last use

_VERSION = 3
_FILES = ("ids", "starts")
_BATCH = 1024  # documents
_LOOK = 0.5  # seconds between looks at a lock


@dataclass(frozen=True)
class Tokens:
    """All tokens in a row, and where each document begins; the last start is the end."""

    ids: NDArray[np.integer]
    starts: NDArray[np.uint64]
    content: str = field(default="", kw_only=True)
    """SHA-256 of the files in the cache, also where these tokens are a part."""

    @property
    def total(self) -> int:
        """The number of tokens."""
        return len(self.ids)

    def part(self, first: int, last: int) -> Tokens:
        """The documents from `first` to before `last`."""
        begin, end = int(self.starts[first]), int(self.starts[last])
        starts = self.starts[first : last + 1] - self.starts[first]
        return Tokens(self.ids[begin:end], starts, content=self.content)

    def first(self, most: int) -> Tokens:
        """The first `most` tokens; 0 is all of them."""
        return Tokens(self.ids[:most], self.starts, content=self.content) if most else self

    def slice(self, start: int, length: int) -> NDArray[np.int64]:
        """`length` tokens from `start` on; the first token follows the last."""
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
) -> Tokens:
    """The tokens with this fingerprint, made now if missing; with `marked`, documents end at LAST.

    The first rank of each node makes and checks them; on a disk that rank 0 has too, rank 0 makes them for all.
    `dataset` is for `dray clean tokens`.
    """
    folder = cache / name
    write = partial(_write, dataset, documents, encode, end=end, vocabulary=vocabulary, marked=marked)
    is_first_of_node = ranks.local_rank() == 0
    comes_second = _has_rank_0s_disk(cache) and not folder.is_dir()

    def prepare(second: bool) -> None:
        if is_first_of_node and comes_second is second:
            if not folder.is_dir():
                _make(folder, write)
            _check(folder)

    for second in (False, True):  # nodes that share rank 0's disk come second
        on_all(partial(prepare, second), lambda *_: None)
    _check_same(folder)
    return _open(folder)


def _has_rank_0s_disk(cache: Path) -> bool:
    """Return whether this rank shares rank 0's disk: it sees a file that rank 0 has just created. False on rank 0."""
    first, probe = ranks.rank() == 0, cache / f".rank-0-{secrets.token_hex(8)}"
    if first:
        with suppress(OSError):  # _make reports a disk that cannot be written
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe.touch(exist_ok=False)
    seen = (cache / broadcast_json(probe.name)).exists()
    barrier()
    if first:
        with suppress(OSError):
            probe.unlink()
    return seen and not first


def _make(folder: Path, write: Callable[[Path], None]) -> None:
    """Write into a temporary folder, then rename it."""
    cache = folder.parent
    with suppress(FileExistsError):  # by a file too, which `_require_private` refuses
        cache.mkdir(mode=0o700, parents=True)
    _require_private(cache)
    part = folder.with_name(f"{folder.name}.part-{secrets.token_hex(8)}")
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        with lock.open("w") as file:
            _wait_for_another(file, folder)
            if not folder.is_dir():
                write(part)
                part.rename(folder)
    except OSError as error:
        if folder.is_dir():
            return  # this disk has no locks, and another run was faster
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DrayError(
            "the disk is full: it has no room for the tokens",
            where=cache,
            found=error.strerror,
            fix="set data.cache_dir to a disk with more room, or remove old tokens: dray clean tokens",
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        lock.unlink(missing_ok=True)


def _wait_for_another(lock: TextIO, folder: Path) -> None:
    """Wait while another run makes these tokens, such as an array task. On a disk without locks each makes them."""
    reported = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not reported:
                say(f"another run makes these tokens; this one waits for it: {folder}")
            reported = True
            heartbeat.beat()
            time.sleep(_LOOK)
        except OSError:
            return


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
    total, began, shown = 0, time.monotonic(), time.monotonic()
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
    sums = {}
    for name in _FILES:
        with (folder / name).open("rb") as file:
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


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
    """Refuse tokens of another user, and tokens that are not as they were written."""
    _require_private(folder.parent)
    _require_private(folder)
    try:
        with suppress(OSError):  # a disk that can only be read
            os.utime(folder / MANIFEST)
        damaged = _manifest(folder)["sha256"] != _sums(folder)
        found = "other bytes than were written"
    except (OSError, ValueError, LookupError, TypeError) as error:
        damaged, found = True, f"{type(error).__name__}: {error}"
    if damaged:
        raise DrayError("tokens in the cache are damaged", where=folder, found=found, fix=f"rm -r '{folder}'")


def _check_same(folder: Path) -> None:
    """Refuse tokens that differ between nodes, of which each may have made its own."""
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
