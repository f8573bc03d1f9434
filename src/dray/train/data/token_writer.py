"""Makes the files of the token cache, atomically, beside other runs that may make the same."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from dray.contract.files import open_to_others, write_atomic
from dray.contract.findings import ConfigError, DrayError
from dray.train.errors import say
from dray.train.heartbeat import heartbeat

LABEL, LAST = 1 << 31, 1 << 30
"""Marks beside a token: it is a label; a document ends with it."""
IDS = LAST - 1
MANIFEST = "manifest.json"  # also `dray clean tokens` reads it; it was modified when the tokens were last used
FILES = ("ids", "starts")

_BATCH = 1024
_ABANDONED = 3600  # seconds without a write
_SIGN, _SILENT, _LOOK = 5.0, 60.0, 0.5  # seconds from sign to sign, after which nobody is there, and between looks


def fill(
    folder: Path,
    dataset: str,
    documents: Callable[[], Iterable[str]],
    encode: Callable[[list[str]], list[int]],
    *,
    end: int,
    vocabulary: int,
    marked: bool,
) -> None:
    """Write into a temporary folder, then rename it. Another node or run may write the same bytes."""
    cache = folder.parent
    with suppress(FileExistsError):  # by a file too, which `private` refuses
        cache.mkdir(mode=0o700, parents=True)
    private(cache)
    if _made_by_another(folder):
        return
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
    signs = []
    for part in folder.parent.glob(f"{folder.name}.part-*"):
        with suppress(OSError):
            signs.append(max(path.stat().st_mtime for path in (part, *part.iterdir())))
    if not signs:
        return None
    with tempfile.TemporaryFile(dir=folder.parent) as now:
        return max(0.0, os.fstat(now.fileno()).st_mtime - max(signs))


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
    total, began, shown, alive = 0, time.monotonic(), time.monotonic(), time.monotonic()
    with (part / "ids").open("wb") as file_of_ids, (part / "starts").open("wb") as starts:
        starts.write(np.zeros(1, np.uint64).tobytes())
        for batch in _batches(documents):
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
            file_of_ids.write(array.astype(kind).tobytes())
            starts.write(
                (np.flatnonzero(array & LAST if marked else array == end) + total + 1).astype(np.uint64).tobytes()
            )
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
    sums = {name: sha256(part / name) for name in FILES}
    write_atomic(
        part / MANIFEST, json.dumps({"kind": np.dtype(kind).name, "sha256": sums, "dataset": dataset}), mode=0o600
    )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def private(folder: Path) -> None:
    """Refuse a folder in which another user may write: planted tokens would change what the model learns."""
    if trouble := open_to_others(folder, folder=True):
        raise ConfigError(
            "the token cache is open to other users",
            where=folder,
            wanted=f"a folder of user {os.geteuid()} that no other user may write to",
            found=trouble,
            fix=f"if the folder is yours: chmod 700 '{folder}'; else set data.cache_dir to a folder of yours",
        )


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(documents)
    while batch := list(islice(iterator, _BATCH)):
        yield batch
