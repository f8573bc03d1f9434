"""Documents as tokens in a file that is mapped into memory: made once on a node, and atomic.

The folder's name is the fingerprint of all that decides its content.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dray.contract import exit_codes, findings
from dray.contract.files import open_to_others, write_atomic
from dray.contract.findings import ConfigError, DrayError, Finding
from dray.train.collectives import all_gather_json
from dray.train.errors import say

LABEL, LAST = 1 << 31, 1 << 30
"""Marks beside a token: it is a label; a document ends with it."""
IDS = LAST - 1

_VERSION = 3
_MANIFEST = "manifest.json"  # also `dray cache list` reads it; it was modified when the tokens were last used
_FILES = ("ids", "starts")
_BATCH = 1024
_ABANDONED = 3600  # seconds without a write


@dataclass(frozen=True)
class Tokens:
    """All tokens in a row, and where each document begins; the last start is the end."""

    ids: NDArray[np.integer]
    starts: NDArray[np.uint64]

    @property
    def total(self) -> int:
        """How many they are."""
        return len(self.ids)

    def part(self, first: int, last: int) -> Tokens:
        """Some of the documents."""
        begin, end = int(self.starts[first]), int(self.starts[last])
        return Tokens(self.ids[begin:end], self.starts[first : last + 1] - self.starts[first])

    def short(self, most: int) -> Tokens:
        """At most so many of the tokens; 0 is all."""
        return Tokens(self.ids[:most], self.starts) if most else self

    def slice(self, start: int, length: int) -> NDArray[np.int64]:
        """`length` tokens from there on; after the last comes the first."""
        ids = self.ids[start : start + length]
        while len(ids) < length:
            ids = np.concatenate([ids, self.ids[: length - len(ids)]])
        return ids.astype(np.int64)


def fingerprint(*parts: object) -> str:
    """Of everything that decides the tokens: files, columns, the tokenizer."""
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
    """The tokens of that fingerprint, made now if they are not there; `marked` ones end where LAST is.

    `dataset` is for `dray cache list`.

    The first rank of each node makes or checks them and the others wait, whether the disk has locks or not.
    """
    folder, failed = cache / name, None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            if not folder.is_dir():
                _fill(folder, dataset, documents, encode, end=end, vocabulary=vocabulary, marked=marked)
            _check(folder)
        except DrayError as error:
            failed = error.finding._asdict()
        except Exception as error:
            traceback.print_exc()
            problem = f"tokenizing failed: {type(error).__name__}: {error}"
            failed = Finding(problem, where=str(cache), code=exit_codes.FAILED)._asdict()
    for finding in filter(None, all_gather_json(failed)):
        raise findings.error(finding)
    _check_same(folder)
    return _open(folder)


def _check_same(folder: Path) -> None:
    """That all nodes have the same tokens, of which each may have made its own."""
    each = all_gather_json(json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["sha256"])
    if other := [rank for rank, sums in enumerate(each) if sums != each[0]]:
        raise ConfigError(
            "the nodes have made different tokens of the same rows",
            where=folder,
            wanted="the same as on rank 0",
            found=f"others on {len(other)} of {len(each)} ranks, the first of which is rank {other[0]}",
            fix="data.map returns the same for the same row on every node: no random numbers, no order of a set; then "
            "remove that folder on each node",
        )


def _fill(
    folder: Path,
    dataset: str,
    documents: Callable[[], Iterable[str]],
    encode: Callable[[list[str]], list[int]],
    *,
    end: int,
    vocabulary: int,
    marked: bool,
) -> None:
    """Write into a folder of its own, then rename it. Another node or run may do the same, with the same bytes."""
    cache = folder.parent
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    _private(cache)
    _remove_left_over(folder)
    part = folder.with_name(f"{folder.name}.part-{secrets.token_hex(8)}")
    try:
        _make(part, dataset, documents(), encode, end=end, vocabulary=vocabulary, marked=marked)
        part.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and folder.is_dir():
            return  # another node's or run's are there now
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.rmtree(part, ignore_errors=True)
        raise DrayError(
            "the disk is full of tokens",
            wanted=f"room in {cache}",
            found=f"{shutil.disk_usage(cache).free / 1e6:.0f} MB left without what was made so far",
            fix="set data.cache_dir to a place with more room",
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _remove_left_over(folder: Path) -> None:
    """What a killed process left. One that is alive writes all the time."""
    for part in folder.parent.glob(f"{folder.name}.part-*"):
        with suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in (part, *part.iterdir())) > _ABANDONED:
                shutil.rmtree(part, ignore_errors=True)


def _make(
    part: Path,
    dataset: str,
    documents: Iterable[str],
    encode: Callable[[list[str]], list[int]],
    *,
    end: int,
    vocabulary: int,
    marked: bool,
) -> None:
    part.mkdir(mode=0o700)
    kind = np.uint16 if vocabulary <= 1 << 16 and not marked else np.uint32
    total, began, shown = 0, time.monotonic(), time.monotonic()
    with (part / "ids").open("wb") as file_of_ids, (part / "starts").open("wb") as starts:
        starts.write(np.zeros(1, np.uint64).tobytes())
        for batch in _batches(documents):
            array = np.asarray(encode(batch), dtype=np.int64)
            ids = array & IDS
            if array.size and int(ids.max()) >= vocabulary:
                raise ConfigError(
                    "the tokenizer has a token that the model lacks",
                    wanted=f"ids below {vocabulary}",
                    found=str(int(ids.max())),
                    fix="set model.tokenizer to the one that belongs to the model",
                )
            file_of_ids.write(array.astype(kind).tobytes())
            starts.write(
                (np.flatnonzero(array & LAST if marked else array == end) + total + 1).astype(np.uint64).tobytes()
            )
            total += len(array)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                say(f"{total:,} tokens made, {total / (shown - began):,.0f} a second")
        for file in (file_of_ids, starts):
            file.flush()
            os.fsync(file.fileno())
    sums = {name: _sha256(part / name) for name in _FILES}
    write_atomic(
        part / _MANIFEST, json.dumps({"kind": np.dtype(kind).name, "sha256": sums, "dataset": dataset}), mode=0o600
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _private(folder: Path) -> None:
    """Refuse a folder in which another user may write: who plants tokens decides what is learned."""
    if trouble := open_to_others(folder, folder=True):
        raise ConfigError(
            "the token cache is open to other users",
            where=folder,
            wanted=f"a folder of user {os.geteuid()} in which no other may write",
            found=trouble,
            fix=f"chmod 700 '{folder}' where it is yours; else set data.cache_dir to a folder that is",
        )


def _check(folder: Path) -> None:
    """That these tokens are this user's, and every byte is as it was written."""
    for one in (folder.parent, folder):
        _private(one)
    wanted: object = "its manifest and two files"
    found: object
    try:
        with suppress(OSError):  # a disk that can only be read
            os.utime(folder / _MANIFEST)
        wanted = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["sha256"]
        found = {name: _sha256(folder / name) for name in _FILES}
    except (OSError, ValueError, LookupError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    if found != wanted:
        raise DrayError(
            "tokens in the cache are damaged", where=folder, wanted=wanted, found=found, fix=f"rm -r '{folder}'"
        )


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(documents)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def _open(folder: Path) -> Tokens:
    kind = np.dtype(json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["kind"])
    starts = np.fromfile(folder / "starts", dtype=np.uint64)
    size = (folder / "ids").stat().st_size
    ids: NDArray[np.integer] = np.memmap(folder / "ids", dtype=kind, mode="r") if size else np.zeros(0, kind)
    return Tokens(ids, starts)
