"""Documents as tokens in a file that is mapped into memory: made once on a machine, whole or not there.

The folder's name is the fingerprint of all that decides its content. Who makes it holds a lock that ends with it, so
that another takes over from one that was killed; the others wait.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dray.train.stop import EXIT_FAILED, say, stop

WANTED, LAST = 1 << 31, 1 << 30
"""Marks beside a token: only what is so marked is to be foretold; here a document ends."""
IDS = LAST - 1

_VERSION = 2
_BATCH = 1024
_WAIT = 0.1
_HOST = socket.gethostname()


@dataclass(frozen=True)
class Tokens:
    """All tokens in a row, and where each document begins; the last start is the end."""

    ids: NDArray[np.integer]
    starts: NDArray[np.uint64]

    def part(self, first: int, last: int) -> Tokens:
        """Some of the documents."""
        begin, end = int(self.starts[first]), int(self.starts[last])
        return Tokens(self.ids[begin:end], self.starts[first : last + 1] - self.starts[first])

    def short(self, most: int) -> Tokens:
        """At most so many of the tokens; 0 is all."""
        return Tokens(self.ids[:most], self.starts) if most else self

    def block(self, start: int, length: int) -> NDArray[np.int64]:
        """`length` tokens from there on; after the last comes the first."""
        ids = self.ids[start : start + length]
        while len(ids) < length:
            ids = np.concatenate([ids, self.ids[: length - len(ids)]])
        return ids.astype(np.int64)


def fingerprint(*parts: object) -> str:
    """Of everything that decides the tokens: files, columns, the tokenizer."""
    said = json.dumps([_VERSION, *map(str, parts)])
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def made(
    cache: Path,
    name: str,
    documents: Callable[[], Iterable[str]],
    encode: Callable[[list[str]], list[int]],
    *,
    end: int,
    vocabulary: int,
    marked: bool = False,
) -> Tokens:
    """The tokens of that fingerprint, made now if nobody has made them; `marked` ones end where LAST is."""
    folder = cache / name
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("a") as lock:
        held = _hold(lock.fileno(), folder)
        if not folder.is_dir():
            # Of one that was killed here: where a disk is shared, another node may be at work, unseen by the lock.
            for left in cache.glob(f"{name}.part-{_HOST}-*") if held else ():
                shutil.rmtree(left, ignore_errors=True)
            part = cache / f"{name}.part-{_HOST}-{os.getpid()}"
            shutil.rmtree(part, ignore_errors=True)  # of one before, whose number was the same
            try:
                _make(part, documents(), encode, end=end, vocabulary=vocabulary, marked=marked)
                part.rename(folder)
            except OSError as error:
                shutil.rmtree(part, ignore_errors=True)
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and folder.is_dir():
                    return _open(folder)  # another node was first
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                free = shutil.disk_usage(cache).free
                stop(
                    "the disk is full of tokens",
                    wanted=f"room in {cache}",
                    found=f"{free / 1e6:.0f} MB left without what was made so far",
                    fix="set data.cache_dir to a place with more room",
                    code=EXIT_FAILED,
                )
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    return _open(folder)


def _hold(lock: int, folder: Path) -> bool:
    """False on a disk without locks, where each makes its own, and the first one's stays."""
    told = 0.0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            if now - told > 10:
                with suppress(FileNotFoundError):  # it is ready at this very moment
                    sizes = [path.stat().st_size for path in folder.parent.glob(f"{folder.name}.part-*/ids")]
                    say(f"waiting for another process that makes the tokens ({sum(sizes) / 1e6:.0f} MB so far)")
                told = now
            time.sleep(_WAIT)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            return False
        else:
            return True


def _make(
    part: Path,
    documents: Iterable[str],
    encode: Callable[[list[str]], list[int]],
    *,
    end: int,
    vocabulary: int,
    marked: bool,
) -> None:
    part.mkdir()
    kind = np.uint16 if vocabulary <= 1 << 16 and not marked else np.uint32
    total, began, told = 0, time.monotonic(), time.monotonic()
    with (part / "ids").open("wb") as file_of_ids, (part / "starts").open("wb") as starts:
        starts.write(np.zeros(1, np.uint64).tobytes())
        for batch in _batches(documents):
            array = np.asarray(encode(batch), dtype=np.int64)
            ids = array & IDS
            if array.size and int(ids.max()) >= vocabulary:
                stop(
                    "the tokenizer gives a token that the model has not",
                    wanted=f"ids below {vocabulary}",
                    found=str(int(ids.max())),
                    fix="take the tokenizer that belongs to the model",
                )
            file_of_ids.write(array.astype(kind).tobytes())
            starts.write(
                (np.flatnonzero(array & LAST if marked else array == end) + total + 1).astype(np.uint64).tobytes()
            )
            total += len(array)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                say(f"{total:,} tokens made, {total / (told - began):,.0f} a second")
        for file in (file_of_ids, starts):
            file.flush()
            os.fsync(file.fileno())
    (part / "kind").write_text(np.dtype(kind).name, encoding="ascii")


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(documents)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def _open(folder: Path) -> Tokens:
    kind = np.dtype((folder / "kind").read_text(encoding="ascii"))
    starts = np.fromfile(folder / "starts", dtype=np.uint64)
    size = (folder / "ids").stat().st_size
    ids: NDArray[np.integer] = np.memmap(folder / "ids", dtype=kind, mode="r") if size else np.zeros(0, kind)
    if len(ids) != int(starts[-1]):
        stop(
            "the tokens on this disk are not whole",
            wanted=f"{int(starts[-1])} tokens in {folder}",
            found=f"{len(ids)}",
            fix=f"remove it: rm -r '{folder}'",
            code=EXIT_FAILED,
        )
    return Tokens(ids, starts)
