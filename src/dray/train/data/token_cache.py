"""Documents as tokens in a file that is mapped into memory: made once on a node, and atomic.

The folder's name is the fingerprint of all that decides its content.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dray.contract import exit_codes, findings
from dray.contract.files import open_to_others
from dray.contract.findings import ConfigError, DrayError, Finding
from dray.train.collectives import all_gather_json, barrier, broadcast_json
from dray.train.data.staged import stage
from dray.train.data.token_writer import FILES, IDS, LABEL, LAST, MANIFEST, fill, private, sha256

__all__ = ["IDS", "LABEL", "LAST", "Tokens", "cached", "fingerprint", "is_own"]


_VERSION = 3


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

    `dataset` is for `dray clean tokens`.

    The first rank of each node makes or checks them and the others wait, whether the disk has locks or not. On a disk
    that rank 0 has too, it makes them for all, and the others check them. `scratch` is the
    attempt's folder on the node.
    """
    folder = cache / name
    near = Path(scratch, "tokens", name) if is_own(scratch) else folder

    def make() -> None:
        if not folder.is_dir():
            fill(folder, dataset, documents, encode, end=end, vocabulary=vocabulary, marked=marked)
        _check(folder)
        if near != folder:
            stage(folder, near)
            if near.exists():
                _check(near)

    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    waits = _has_rank_0s_disk(cache) and not folder.is_dir()
    for turn in (False, True):
        failed = _failed(cache, make) if leads and waits is turn else None
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


def _failed(cache: Path, make: Callable[[], None]) -> dict[str, Any] | None:
    try:
        make()
    except DrayError as error:
        return error.finding._asdict()
    except Exception as error:
        traceback.print_exc()
        problem = f"tokenizing failed: {type(error).__name__}: {error}"
        return Finding(problem, where=str(cache), code=exit_codes.FAILED)._asdict()
    return None


def _has_rank_0s_disk(cache: Path) -> bool:
    """Whether this is another rank, and sees a file that rank 0 has made there now."""
    first, probe = int(os.environ.get("RANK", "0")) == 0, cache / f".rank-0-{secrets.token_hex(8)}"
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


def _check_same(folder: Path) -> None:
    """That all nodes have the same tokens, of which each may have made its own."""
    each = all_gather_json(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"])
    if other := [rank for rank, sums in enumerate(each) if sums != each[0]]:
        raise ConfigError(
            "the nodes made different tokens from the same rows",
            where=folder,
            wanted="the same tokens as on rank 0",
            found=f"other tokens on {len(other)} of {len(each)} ranks, first on rank {other[0]}",
            fix="make data.map return the same for the same row on every node (no random numbers, no order of a set), "
            "then remove that folder on each node",
        )


def _check(folder: Path) -> None:
    """That these tokens are this user's, and every byte is as it was written."""
    for one in (folder.parent, folder):
        private(one)
    wanted: object = "its manifest and two files"
    found: object
    try:
        with suppress(OSError):  # a disk that can only be read
            os.utime(folder / MANIFEST)
        wanted = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        found = {name: sha256(folder / name) for name in FILES}
    except (OSError, ValueError, LookupError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    if found != wanted:
        raise DrayError(
            "tokens in the cache are damaged", where=folder, wanted=wanted, found=found, fix=f"rm -r '{folder}'"
        )


def _open(folder: Path) -> Tokens:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    kind = np.dtype(manifest["kind"])
    content = hashlib.sha256(json.dumps(manifest["sha256"], sort_keys=True).encode()).hexdigest()
    starts = np.fromfile(folder / "starts", dtype=np.uint64)
    size = (folder / "ids").stat().st_size
    ids: NDArray[np.integer] = np.memmap(folder / "ids", dtype=kind, mode="r") if size else np.zeros(0, kind)
    return Tokens(ids, starts, content=content)
