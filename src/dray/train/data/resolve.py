"""A dataset of the recipe as it is now: its files, their identity, and pieces of the chosen rows for many readers.

Rank 0 alone lists remote files, and sends the list to all ranks. Where the pieces begin depends on the files and on the
number of readers, never on the rank.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dray.contract.findings import ConfigError, listed
from dray.contract.trainer.dataset import BUILTIN, ENDINGS, HUB, ending, parse
from dray.train.collectives import on_rank_0
from dray.train.data import formats, hub, remote
from dray.train.data.formats import Piece, Reading, builder_of, refusing_damage

_PIECE, _LEAST = 1 << 24, 1 << 14  # bytes of a file of lines; of a piece of it, where readers are many
_AT_ONCE = 32  # footers

Identity = tuple[tuple[Any, ...], ...]
"""Files, each with what tells one version of it from another: a time, or a URL's size and tag."""


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
        return tuple(name for name, *_ in self.versions)

    @property
    def builders(self) -> set[str]:
        """Those of `datasets` that read it."""
        return {builder_of(file)[0] for file in self.files} - {""}

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(version[0] for _, *version in self.versions if version)

    @property
    def identity(self) -> tuple[object, ...]:
        """It changes when the files do, or another slice is named."""
        return tuple(part for rows, files in self.parts for part in (*([rows] if rows else []), *files))

    def pieces(self, reading: Reading, readers: int = 1) -> list[Piece]:
        """Return the pieces in order; files of lines are cut smaller for many readers."""
        size = min(_PIECE, max(_LEAST, self.size // readers))
        return [piece for rows, files in self.parts for piece in _slice(rows, _pieces(files, size), reading)]


def dataset(name: str, split: str, *, streamed: bool = False) -> Dataset:
    """Return the dataset of this name; `split` is for a dataset of the hub whose name has none."""
    named = parse(name)

    def look() -> list[tuple[str, Identity]]:
        if named.builder == HUB:
            parts = hub.dataset(name, split, streamed=streamed)
        else:
            files = find_files(named.files, named.builder)
            parts = [(part if "[" in part else "", files) for part in (named.split or "train").split("+")]
        return [(rows, _identity(files)) for rows, files in parts]

    is_remote = named.remote or (named.builder == HUB and (streamed or "[" in named.split))
    parts = on_rank_0(look) if is_remote else look()
    return Dataset(tuple((rows, tuple(tuple(file) for file in files)) for rows, files in parts))


def pieces(dataset: Dataset, reading: Reading, readers: int = 1) -> list[Piece]:
    """Cut the dataset into pieces for this many readers; rank 0 looks, and counts rows if there are slices."""

    def look() -> list[tuple[Any, ...]]:
        return [(piece.path, piece.bytes, piece.rows, piece.version) for piece in dataset.pieces(reading, readers)]

    return [Piece(path, *(part and tuple(part) for part in parts)) for path, *parts in on_rank_0(look)]


def find_files(place: str, builder: str = "") -> tuple[str, ...]:
    """The files of a path, a folder, a pattern or a URL, in order; BUILDER:FILE if a builder of `datasets` reads it."""
    if place == BUILTIN:
        return (BUILTIN,)
    known: tuple[str, ...] = formats.OWN_ENDINGS
    if builder:
        known = (f".{builder}", *(end for end, kind in ENDINGS.items() if kind == builder))
    endings = tuple(f"{end}{more}" for end in known for more in ("", *formats.COMPRESSED))
    files = remote.files(place, endings) if "://" in place else _on_disk(place, endings)
    if not files:
        raise ConfigError(
            "the dataset does not exist",
            wanted=f"a file, a pattern that matches files, or a folder with files that end in {listed(known)}",
            found=f"nothing at {place}",
            fix="check [data] in the recipe",
        )
    kinds = [builder or ENDINGS.get(ending(file), "") for file in files]
    return tuple(f"{kind}:{file}" if kind else file for kind, file in zip(kinds, files, strict=True))


def _on_disk(place: str, endings: tuple[str, ...]) -> list[str]:
    path = Path(place)
    if path.is_dir():
        return sorted(str(file) for file in path.rglob("*") if file.is_file() and str(file).lower().endswith(endings))
    return [place] if path.exists() else sorted(map(str, path.parent.glob(path.name)))


def _identity(names: tuple[str, ...]) -> Identity:
    """The identity of these files; it changes when they change."""
    urls = [name for name in names if "://" in name]
    tags = dict(zip(urls, remote.versions([builder_of(url)[1] for url in urls]), strict=True))
    return tuple((name, *(tags[name] if name in tags else _size_and_time(name))) for name in names)


def _size_and_time(name: str) -> tuple[int, ...]:
    if name == BUILTIN:
        return ()
    with refusing_damage(path := builder_of(name)[1]):
        stat = os.stat(path)  # noqa: PTH116  a string, as all here
    return stat.st_size, stat.st_mtime_ns


def _pieces(files: Identity, size: int) -> list[Piece]:
    """Parts of the files that can be read without what is before them; of lines, with so many bytes."""
    grouped = [name for name, *_ in files if formats.has_groups(name)]
    with ThreadPoolExecutor(_AT_ONCE) as threads:  # each answer of a server takes time
        groups = dict(zip(grouped, threads.map(formats.groups, grouped), strict=True))
    found = []
    for name, *version in files:
        whole = Piece(name, version=(version[0], version[1]) if "://" in name else None)
        if name in groups:
            found += [replace(whole, rows=rows) for rows in groups[name]]
        elif formats.has_lines(name):
            end = version[0]
            found += [replace(whole, bytes=(begin, min(begin + size, end))) for begin in range(0, end, size)]
        else:
            found.append(whole)
    return found


def _slice(rows: str, pieces: list[Piece], reading: Reading) -> list[Piece]:
    """The pieces of some rows, such as train[:1%]; empty is all."""
    if not rows:
        return pieces
    size = cache(lambda piece: formats.count(piece, reading))
    # The rows behind the end of [1000:2000] need no counting.
    total = sum(map(size, pieces)) if "%" in rows or "-" in rows else 1 << 62
    ((first, last),) = formats.slice_bounds(rows, total)
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
            where=pieces[0].path if pieces else rows,
            wanted="at least one row",
            found=f"rows {first:,} to {last:,} of {begin:,}",
            fix="set another slice",
        )
    return chosen
