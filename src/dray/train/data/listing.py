"""The files of a dataset: find them, identify them, and explain what is wrong with them."""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from dray.contract.dataset import BUILDERS, BUILTIN, ENDINGS, ending
from dray.contract.findings import ConfigError, listed
from dray.train.data import remote
from dray.train.data.lines import COMPRESSED

LINES, ARROW = (".txt", ".text", ".md", ".jsonl", ".ndjson"), (".parquet", ".arrow")
KNOWN = (*LINES, ".json", ".csv", ".tsv", *ARROW)
_ENDINGS = ENDINGS | {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".text": "text",
    ".parquet": "parquet", ".arrow": "arrow", ".conll": "conll", ".conllu": "conll", ".fasta": "fasta", ".fa": "fasta",
    ".fastq": "fastq", ".fq": "fastq", ".gb": "genbank", ".gbk": "genbank", ".tsfile": "tsfile", ".vortex": "vortex",
}  # fmt: skip


def files(place: str, builder: str = "") -> tuple[str, ...]:
    """The files of a path, a folder, a pattern or a URL, always in the same order; each behind its builder's name."""
    if place == BUILTIN:
        return (BUILTIN,)
    found = remote.files(place, _folder(builder)) if "://" in place else _on_disk(place, builder)
    if not found:
        wanted = f"a folder with files that end in {listed(_folder(builder))}"
        wanted = wanted if Path(place).is_dir() else "a file, a folder, or a pattern that matches files"
        fix = "check [data] in the recipe"
        raise ConfigError("the dataset does not exist", wanted=wanted, found=f"nothing at {place}", fix=fix)
    if odd := [one for one in found if _is_odd(one, builder)]:
        problem = "the dataset is not a file"
        raise ConfigError(problem, where=odd[0], wanted="a regular file", fix="check [data] in the recipe")
    return tuple(f"{kind}:{one}" if (kind := builder or ENDINGS.get(ending(one), "")) else one for one in found)


def _on_disk(place: str, builder: str) -> list[str]:
    path = Path(place)
    if path.is_dir() and not place.endswith(".lance"):  # which is a folder itself
        endings = _folder(builder)
        return sorted(str(one) for one in path.rglob("*") if one.is_file() and str(one).lower().endswith(endings))
    return [place] if path.exists() else sorted(map(str, path.parent.glob(path.name)))


def _folder(builder: str) -> tuple[str, ...]:
    """The endings of the files that a folder is searched for."""
    own = [ending for ending, kind in _ENDINGS.items() if kind == builder] if builder else [*KNOWN]
    return tuple(f"{ending}{more}" for ending in own for more in ("", *COMPRESSED))


def _is_odd(path: str, builder: str) -> bool:
    """Whether it is no file: a FIFO would be waited for."""
    if "://" in path or ((builder == "lance" or path.endswith(".lance")) and Path(path).is_dir()):
        return False
    return not Path(path).is_file()


def identity(names: tuple[str, ...]) -> tuple[tuple[object, ...], ...]:
    """The identity of these files; it changes when they change."""
    far = dict(zip(urls := [builder_of(name)[1] for name in names if "://" in name], remote.seen(urls), strict=True))
    return tuple((name, *(far[builder_of(name)[1]] if "://" in name else _seen(name))) for name in names)


def builder_of(name: str) -> tuple[str, str]:
    """A file's builder, or nothing, and its path."""
    builder, colon, path = name.partition(":")
    return (builder, path) if colon and builder in BUILDERS and not path.startswith("//") else ("", name)


def _seen(name: str) -> tuple[int, ...]:
    if name == BUILTIN:
        return ()
    with readable(path := builder_of(name)[1]):
        found = [os.stat(path)]  # noqa: PTH116  a string, as all here
        if Path(path).is_dir():
            found = [one.stat() for one in Path(path).rglob("*") if one.is_file()] or found
    return (sum(one.st_size for one in found), max(one.st_mtime_ns for one in found))


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn errors of a reader into a ConfigError: the file is missing, forbidden, cut off or damaged."""
    path = builder_of(path)[1]
    try:
        with remote.reading(path) if "://" in path else nullcontext():
            yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        unreadable(path, error)


def unreadable(path: str, error: Exception) -> NoReturn:
    """Refuse a file that is missing, forbidden or damaged."""
    gone = isinstance(error, OSError) and error.errno is not None
    raise ConfigError(
        "the dataset cannot be read",
        wanted=f"a whole {ending(path).removeprefix('.') or 'text'} file at {path}",
        found=(error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]),
        fix="check [data] in the recipe" if gone else "fetch or write that file again",
    )
