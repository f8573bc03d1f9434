"""A dataset of a recipe: its name, hub:OWNER/NAME... or [BUILDER:]FILES[:train[SLICE]], and its share of a mix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from dray.contract import secrets

HUB, BUILTIN = "hub", "builtin"
BUILDERS = (
    "arrow", "conll", "csv", "fasta", "fastq", "genbank", "hdf5", "json", "parquet", "text", "tsfile", "webdataset",
)  # fmt: skip
"""The builders of `datasets` that make rows with text. Not `pandas`, whose pickles may run code."""
ENDINGS = {".tar": "webdataset", ".h5": "hdf5", ".hdf5": "hdf5"}
"""File endings from which dray knows the builder."""
BLOCK = 1024
"""The samples of a block of a mix, in which every dataset has its share."""
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

_BUILDER = re.compile(r"([A-Za-z][A-Za-z0-9_]+):(?!//)(.*)", re.DOTALL)
_ONE = r"[A-Za-z]\w*\[[^\[\]/]*\]|train"
_SPLIT = re.compile(rf"(.*):((?:{_ONE})(?:\+(?:{_ONE}))*)", re.DOTALL)
_BOUND = r"(?:(-?\d+)%|-?\d+)?"
_SLICE = re.compile(rf"[^\[\]]+(?:\[{_BOUND}:{_BOUND}\])?")
_SHOWN = "would appear in plans and run folders"
_SIGNED = re.compile("(?i)sig|token|secret|credential|password|key")


class Named(NamedTuple):
    """A dataset's name in its parts."""

    builder: str
    """HUB, one of BUILDERS, or empty for dray's own readers."""
    files: str
    """A path, a pattern or a URL of files; for HUB, the dataset without its split."""
    split: str = ""
    """Such as train[:1%]; hub datasets may have other splits. Empty: the default of the recipe's key."""

    @property
    def remote(self) -> bool:
        """Whether fsspec reads its files: s3://, hf://, https:// and others."""
        return self.builder != HUB and "://" in self.files

    @property
    def path(self) -> str:
        """The file, folder or pattern on this machine's disk; empty if there is none."""
        return "" if self.builder == HUB or self.remote or self.files in ("", BUILTIN) else self.files

    def at(self, path: str) -> str:
        """The same dataset with its files elsewhere."""
        return ":".join(filter(None, (self.builder, path, self.split)))


def parse(name: str) -> Named:
    """The parts of a name."""
    match = _BUILDER.fullmatch(name)
    builder, rest = (match[1], match[2]) if match else ("", name)
    if builder == HUB:
        files, _, split = rest.partition(":")
        return Named(HUB, files, split)
    match = _SPLIT.fullmatch(rest)
    files, split = (match[1], match[2]) if match else (rest, "")
    return Named(builder, files, split)


def ending(files: str) -> str:
    """A file's ending without its compression: .jsonl for texts.jsonl.zst and for https://host/texts.jsonl?x=1."""
    path = PurePosixPath((_url(files).path if "://" in files else files).lower())
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix


def trouble(name: str) -> str:
    """What is wrong with a name; empty if nothing is."""
    named = parse(name)
    if named.builder == HUB:
        return _slice_trouble(named)
    return _builder_trouble(named) or _url_trouble(named) or _slice_trouble(named)


def shows_secret(name: str) -> bool:
    """Whether the name holds a secret, so that no message may show it."""
    return _SHOWN in _url_trouble(parse(name))


def kwargs_trouble(names: Iterable[str], kwargs: Mapping[str, Mapping[str, object]]) -> str:
    """What is wrong with the builders' arguments, given these datasets; empty if nothing is."""
    builders = {named.builder or ENDINGS.get(ending(named.files), "") for named in map(parse, names)}
    if unused := sorted({*kwargs} - builders):
        return f"data.config_kwargs.{unused[0]}: no dataset uses this builder; name one as {unused[0]}:FILES"
    return ""


def quotas(size: int, weights: Sequence[float]) -> list[int]:
    """Share out `size` samples by weight, the rest to the largest remainders. Exact, so the same on every machine."""
    parts = [Fraction(weight) for weight in weights]
    exact = [size * part / sum(parts) for part in parts]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: (shares[source] - exact[source], source))
    for source in by_remainder[: size - sum(shares)]:
        shares[source] += 1
    return shares


def is_too_light(weight: float, weights: Sequence[float]) -> bool:
    """Whether a weight gives less than one sample of a block, so that its dataset may never be read."""
    return BLOCK * Fraction(weight) < sum(map(Fraction, weights))


def _builder_trouble(named: Named) -> str:
    if named.builder == "pandas":
        return "pandas reads pickles, which may run code; convert the files to parquet"
    if named.builder and named.builder not in BUILDERS:
        known = ", ".join(BUILDERS)
        return f"{named.builder} is not a builder that reads text ({known}); write ./ before a file name with a colon"
    for part in filter(None, named.split.split("+")):
        if part.partition("[")[0] != "train":
            return f"files have only the split train, not {part}; name the files of that split"
    return ""


def _url_trouble(named: Named) -> str:
    if not named.remote:
        return ""
    url = _url(named.files)
    if "@" in url.netloc:
        return f"a URL with a user or password {_SHOWN}; export the secret, and name it in pass_env"
    if any(_SIGNED.search(key) or secrets.is_name(key) for key, _ in parse_qsl(url.query, keep_blank_values=True)):
        return f"a signed URL {_SHOWN}; use s3:// or hf://, and name the secret's variable in pass_env"
    if not url.netloc or "$" in named.files:
        return "expected a complete URL of files, without variables, such as s3://BUCKET/FOLDER/*.jsonl.zst"
    if url.scheme in ("http", "https") and "*" in url.path:
        return "a web server cannot list files; name one file, or use a pattern with s3:// or hf://"
    return ""


def _url(files: str) -> SplitResult:
    """The parts of a URL; all are empty if it is none, such as one with an open bracket."""
    try:
        return urlsplit(files)
    except ValueError:
        return urlsplit("")


def _slice_trouble(named: Named) -> str:
    for part in named.split.split("+") if named.split else ():
        bounds = _SLICE.fullmatch(part)
        if not bounds:
            return f"{part}: expected a split such as train, train[:1%] or train[1000:2000]"
        for percent in filter(None, bounds.groups()):
            if abs(int(percent)) > 100:
                return f"{part}: {percent}% is not between -100% and 100%"
    return ""
