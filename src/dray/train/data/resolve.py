"""A dataset of the recipe as it is now: its files, their identity, and pieces of the chosen rows for many readers.

Rank 0 alone asks for what is elsewhere, for all. Where the pieces begin follows from the files and from how many
readers there are in all, never from who reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, cast

from dray.contract.dataset_name import HUB, ending, parse
from dray.contract.findings import ConfigError
from dray.train.collectives import on_rank_0
from dray.train.data import builders, formats, hub
from dray.train.data.files import Identity, builder_of, find, has_lines, identity
from dray.train.data.formats import Piece, Reading
from dray.train.data.remote import Seen

_PIECE, _LEAST = 1 << 24, 1 << 14  # bytes of a file of lines; of a piece of it, where readers are many
_AT_ONCE = 32  # footers


@dataclass(frozen=True)
class Dataset:
    """What the recipe names: slices such as train[:1%], or empty for all rows, with their files."""

    parts: tuple[tuple[str, Identity], ...]

    @property
    def versions(self) -> Identity:
        """The files, each once."""
        return tuple(dict.fromkeys(file for _, files in self.parts for file in files))

    @property
    def files(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(str(name) for name, *_ in self.versions)

    @property
    def builders(self) -> set[str]:
        """Those of `datasets` that read it."""
        return {builder_of(file)[0] for file in self.files} - {""}

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(cast(int, about[0]) for _, *about in self.versions if about)

    @property
    def identity(self) -> tuple[object, ...]:
        """It changes when the files do, or another slice is named."""
        return tuple(part for rows, files in self.parts for part in (*([rows] if rows else []), *files))

    def pieces(self, reading: Reading) -> list[Piece]:
        """All of it, in order."""
        return [piece for rows, files in self.parts for piece in _slice(rows, _pieces(files), reading)]


def dataset(name: str, split: str, *, streamed: bool = False) -> Dataset:
    """What the recipe names so; `split` is that of a hub's dataset where the name has none."""
    named = parse(name)

    def look() -> list[tuple[str, Identity]]:
        if named.builder == HUB:
            parts = hub.dataset(name, split, streamed=streamed)
        else:
            files = find(named.files, named.builder)
            parts = [(part if "[" in part else "", files) for part in (named.split or "train").split("+")]
        return [(rows, identity(files)) for rows, files in parts]

    elsewhere = named.remote or (named.builder == HUB and (streamed or "[" in named.split))
    parts = on_rank_0(look) if elsewhere else look()
    return Dataset(tuple((rows, tuple(tuple(file) for file in files)) for rows, files in parts))


def of_files(names: tuple[str, ...]) -> Dataset:
    """Files of this machine's disk, all of their rows."""
    return Dataset((("", identity(names)),))


def pieces(dataset: Dataset, reading: Reading, readers: int = 1) -> list[Piece]:
    """Cut the dataset into pieces for this many readers; rank 0 looks, and counts rows if there are slices."""

    def look() -> list[tuple[Any, ...]]:
        whole = dataset.pieces(reading)
        parts = -(-readers // max(1, len(whole)))
        cut = [part for piece in whole for part in (_cut(piece, parts, reading) if parts > 1 else [piece])]
        return [(piece.path, piece.bytes, piece.rows, piece.seen) for piece in cut]

    return [Piece(path, *(values and cast(Any, tuple(values)) for values in parts)) for path, *parts in on_rank_0(look)]


def _pieces(files: Identity) -> list[Piece]:
    """Parts of the files that can be read without what is before them."""
    parquet = [str(name) for name, *_ in files if formats.in_arrow(str(name)) and ending(str(name)) == ".parquet"]
    with ThreadPoolExecutor(_AT_ONCE) as threads:  # each answer from elsewhere takes its time
        groups = dict(zip(parquet, threads.map(formats.arrow().row_groups, parquet) if parquet else (), strict=True))
    found = []
    for name, *about in files:
        path = str(name)
        whole = Piece(path, seen=cast(Seen, tuple(about)) if "://" in path else None)
        if path in groups:
            begin = 0
            for size in groups[path]:
                found.append(whole.part(begin, begin + size))
                begin += size
        elif has_lines(path):
            size = cast(int, about[0])
            found += [replace(whole, bytes=(begin, min(begin + _PIECE, size))) for begin in range(0, size, _PIECE)]
        else:
            found.append(whole)
    return found


def _cut(piece: Piece, parts: int, reading: Reading) -> Iterator[Piece]:
    """So many parts of a piece, where one can be read without what is before it."""
    by_bytes = piece.bytes if not piece.rows else None
    if not by_bytes and not formats.in_arrow(piece.path):
        yield piece
        return
    begin, end = by_bytes or (0, formats.count(piece, reading))
    parts = max(1, min(parts, (end - begin) // (_LEAST if by_bytes else 1)))
    for first, last in pairwise(begin + (end - begin) * part // parts for part in range(parts + 1)):
        yield replace(piece, bytes=(first, last)) if by_bytes else piece.part(first, last)


def _slice(rows: str, pieces: list[Piece], reading: Reading) -> list[Piece]:
    """The pieces of some rows, such as train[:1%]; empty is all."""
    if not rows:
        return pieces
    size = cache(lambda piece: formats.count(piece, reading))
    # The rows behind the end of [1000:2000] need no counting.
    total = sum(map(size, pieces)) if "%" in rows or "-" in rows else 1 << 62
    ((first, last),) = builders.slices(rows, total)
    chosen, begin = [], 0
    for piece in pieces:
        if begin >= last:
            break
        start, end = max(first - begin, 0), min(last - begin, size(piece))
        if start < end:
            chosen.append(piece.part(start, end))
        begin += size(piece)
    if not chosen:
        raise ConfigError(
            f"the slice {rows} has no rows",
            where=pieces[0].path,
            wanted="at least one row",
            found=f"rows {first:,} to {last:,} of {begin:,}",
            fix="set another slice",
        )
    return chosen
