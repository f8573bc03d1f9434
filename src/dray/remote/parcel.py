"""Pack dray's scripts and a recipe's files for a remote, as reproducible tars."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.contract import dataset_name, files
from dray.contract.findings import ConfigError

FILES, BYTES = 2000, 64 << 20
"""The most files and bytes that dray copies with a recipe."""
_SUMS = ".dray-sums"
"""Checksums of each copied file, for sha256sum; a folder may have its own SHA256SUMS."""
# What a job and a login node read of a checkout; the rest is in the image.
_DRAY = ("slurm", "recipes", "containers/environment", "containers/steps")
# These name nothing that is read, or what is written, or a folder that is brought whole.
_ELSEWHERE = {
    "name", "about", "image", "layer", "launcher", "scale", "env", "pass_env", "model.type", "data.cache_dir",
    "checkpoint.folder", "checkpoint.mirror", "command.folder", "train.strategy",
}  # fmt: skip
_SCALES = get_args(Recipe.model_fields["scale"].annotation)
_LEFT = {"__pycache__", "runs", "build", "node_modules"}


class Parcel(NamedTuple):
    """A tar, and its name at the remote: KIND/DIGEST."""

    item: str
    data: bytes


def dray() -> Parcel:
    """The scripts of this checkout, or of this installation."""
    root = dray_home.root()
    package = Path(__file__).resolve().parents[1]  # in a wheel the checkout is without it
    found: dict[str, Path] = {}
    for name in _DRAY:
        path = root / name if (root / name).exists() else package / name.removeprefix("src/dray/")
        found |= {f"{name}/{file.relative_to(path)}" if path.is_dir() else name: file for file in _below(path)}
    return _packed("dray", found)


def recipe(path: Path | None, values: Iterable[str], folder: Path | None, beside: Path, site: Path | None) -> Parcel:
    """A recipe's file, what `values` name `beside` it, and all of `folder`, where a command runs."""
    found: dict[str, Path] = {}
    if path:
        found[path.name] = path.absolute()
    for value in values:
        for one in _named(beside, value):
            _add(found, one, beside)
    if folder:
        _add(found, folder, beside)
    if site:
        found[f".site/{site.name}"] = site.absolute()
    return _packed("recipes", found)


def texts(value: object, key: str = "") -> Iterator[str]:
    """The texts in a recipe's tables that may name a file beside it."""
    if key in _ELSEWHERE:
        return
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from texts(one, f"{key}.{name}" if key and key not in _SCALES else name)
    elif isinstance(value, Sequence):
        for one in value:
            yield from texts(one, key)


def _named(beside: Path, value: str) -> Iterator[Path]:
    """A path or pattern that begins beside the recipe, also with BUILDER: or :SPLIT; an absolute one is there."""
    for text in dict.fromkeys((value, value.partition(":")[0], dataset_name.parse(value).files)):
        if not text or text.startswith(("/", "~")) or not text.strip("./") or not (found := _matching(beside, text)):
            continue
        if ".." in Path(text).parts:
            raise ConfigError(
                "a file of the recipe is outside the recipe's folder; dray copies nothing from outside to a remote",
                where=beside,
                found=text,
                fix="put it beside the recipe, or give its absolute path on the remote",
            )
        yield from found
        return


def _matching(beside: Path, text: str) -> list[Path]:
    try:
        path = beside / text
        found = [path] if path.exists() else beside.glob(text) if set("*?[") & {*text} else []
        return sorted(islice(found, FILES + 1))
    except (OSError, ValueError):  # a text that is no file's name and no pattern
        return []


def _add(found: dict[str, Path], path: Path, beside: Path) -> None:
    """What is in `path`, by its place without links. Links to folders on the way and in there go along as links."""
    root = place = Path(os.path.realpath(beside))
    for part in path.relative_to(beside).parts:
        place /= part
        if place.is_symlink() and place.is_dir():
            found[str(place.relative_to(root))] = place
            place = _target(place, root)
    for file in _below(place):
        if file.is_symlink():
            _target(file, place if file.is_dir() else root)
        found[str(file.relative_to(root))] = file
        if len(found) > FILES:
            raise _too_much(f"more than {FILES} files", found)


def _target(link: Path, folder: Path) -> Path:
    """The target of a link, which must be in this folder."""
    target = Path(os.path.realpath(link))
    if not target.is_relative_to(folder):
        raise ConfigError(
            "a link points outside the folder that dray copies to a remote",
            where=link,
            wanted=f"a link to something in {folder}",
            found=target,
            fix="replace it by a copy, or remove it and give an absolute path on the remote",
        )
    return target


def _below(path: Path) -> Iterator[Path]:
    """A file, or the files and the links of a folder; without hidden ones, and what programs and runs leave."""
    if not path.is_dir():
        yield path
        return
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        try:
            entries = os.scandir(folder)
        except OSError as error:
            raise _unreadable(folder, error) from error
        with entries:
            for one in entries:
                if one.name.startswith(".") or one.name in _LEFT:
                    continue
                if one.is_dir(follow_symlinks=False):
                    waiting.append(Path(one.path))
                else:
                    yield Path(one.path)


def _packed(kind: str, found: Mapping[str, Path]) -> Parcel:
    total, contents, links = 0, dict[str, tuple[bytes, bool]](), dict[str, str]()
    for name, path in sorted(found.items()):
        if not name.isprintable() or "\\" in name or name == _SUMS:
            raise ConfigError("dray cannot copy a file with this name to a remote", found=ascii(name), fix="rename it")
        if path.is_dir():
            links[name] = os.path.relpath(os.path.realpath(path), path.parent)
            continue
        try:
            mode = path.stat().st_mode
            total += path.stat().st_size
            if total > BYTES:
                raise _too_much(f"more than {BYTES >> 20} MiB", found)
            contents[name] = (files.read(path, limit=BYTES), bool(mode & stat.S_IXUSR))
        except OSError as error:
            raise _unreadable(path, error) from error
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, (data, _) in contents.items())
    contents[_SUMS] = (sums.encode(), False)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, (data, runs) in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755 if runs else 0o644
            tar.addfile(member, io.BytesIO(data))
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    made = stream.getvalue()
    return Parcel(f"{kind}/{hashlib.sha256(made).hexdigest()}", made)


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError("a file cannot be read", where=path, found=error.strerror or error)


def _too_much(what: str, found: Mapping[str, Path]) -> ConfigError:
    return ConfigError(
        "the recipe's files are too many or too large to copy",
        wanted=f"at most {FILES} files and {BYTES >> 20} MiB",
        found=f"{what}, from {next(iter(found.values())).parent}",
        fix="copy data to the remote once, and give its absolute path there; start a command in a folder of its own",
    )
