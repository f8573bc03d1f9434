"""A dataset of the recipe as it is now: its files, their identity, and the chosen rows.

What is elsewhere is asked by rank 0 alone, for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from dray.contract.dataset_name import HUB, parse
from dray.contract.findings import ConfigError
from dray.train.collectives import on_rank_0
from dray.train.data import builders, hub, sources
from dray.train.data.files import builder_of, find, identity
from dray.train.data.sources import Piece, Reading

Identity = tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class Part:
    """Files, and which of their rows: train[:1%], or empty for all."""

    rows: str
    files: Identity
    """Each with what tells it from others."""


@dataclass(frozen=True)
class Dataset:
    """What the recipe names."""

    parts: tuple[Part, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(str(file[0]) for part in self.parts for file in part.files))

    @property
    def builders(self) -> tuple[str, ...]:
        """Those of `datasets` that read it."""
        return tuple(dict.fromkeys(filter(None, (builder_of(file)[0] for file in self.files))))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        each = {file[0]: file[1] for part in self.parts for file in part.files if len(file) > 1}
        return sum(size for size in each.values() if isinstance(size, int))

    @property
    def identity(self) -> tuple[object, ...]:
        """It changes when the files do, or another slice is named."""
        return tuple(one for part in self.parts for one in (*([part.rows] if part.rows else []), *part.files))

    def pieces(self, reading: Reading) -> list[Piece]:
        """All of it, in order."""
        return [piece for part in self.parts for piece in _pieces(part, reading)]


def dataset(name: str, split: str, *, streamed: bool = False) -> Dataset:
    """What the recipe names so; `split` is that of a hub's dataset where the name has none."""
    named = parse(name)

    def look() -> list[tuple[str, Identity]]:
        if named.builder == HUB:
            parts = hub.dataset(name, split, streamed=streamed)
        else:
            found = find(named.files, named.builder)
            parts = [(one if "[" in one else "", found) for one in (named.split or "train").split("+")]
        return [(rows, identity(files)) for rows, files in parts]

    elsewhere = named.remote or (named.builder == HUB and (streamed or "[" in named.split))
    parts = on_rank_0(look) if elsewhere else look()
    return Dataset(tuple(Part(rows, tuple(tuple(file) for file in files)) for rows, files in parts))


def of_files(names: tuple[str, ...]) -> Dataset:
    """Files of this machine's disk, all of their rows."""
    return Dataset((Part("", identity(names)),))


def pieces(found: Dataset, reading: Reading, readers: int = 1) -> list[Piece]:
    """Cut the dataset into pieces for this many readers; rank 0 looks, and counts rows if there are slices."""

    def look() -> list[tuple[str, int, int, tuple[int, int] | None, tuple[int, str] | None]]:
        cut = sources.cut(found.pieces(reading), readers, reading)
        return [(one.path, one.begin, one.end, one.rows, one.seen) for one in cut]

    return [
        Piece(path, begin, end, rows and (rows[0], rows[1]), seen and (seen[0], seen[1]))
        for path, begin, end, rows, seen in on_rank_0(look)
    ]


def _pieces(part: Part, reading: Reading) -> Iterator[Piece]:
    names = tuple(str(file[0]) for file in part.files)
    all_ = sources.pieces(names, part.files)
    if not part.rows:
        yield from all_
        return
    relative = "%" in part.rows or "-" in part.rows
    if relative:
        counts = [sources.count(piece, reading) for piece in all_]
        ((first, last),) = builders.slices(part.rows, sum(counts))
        ends = [*accumulate(counts)]
    else:  # then the rows behind its end need no counting
        ((first, last),) = builders.slices(part.rows, 1 << 62)
        ends = []
        for piece in all_:
            ends.append((ends[-1] if ends else 0) + sources.count(piece, reading))
            if ends[-1] >= last:
                break
    if first >= min(last, ends[-1] if ends else 0):
        raise ConfigError(
            f"the slice {part.rows} has no rows",
            where=names[0],
            wanted="at least one row",
            found=f"rows {first:,} to {last:,} of {ends[-1] if ends else 0:,}",
            fix="set another slice",
        )
    begin = 0
    for piece, end in zip(all_, ends, strict=False):
        if first < end and last > begin:
            within = (max(first - begin, 0), min(last, end) - begin)
            yield replace(piece, rows=None if within == (0, end - begin) else within)
        begin = end
