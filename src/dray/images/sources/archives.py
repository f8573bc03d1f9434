"""Source archives that a build compiles: pinned tars of releases, which the host fetches or the user brings."""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import ssl
import tarfile
import urllib.request
import zlib
from collections.abc import Callable
from http.client import HTTPException
from io import BufferedIOBase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from dray.clients import builder
from dray.clients.progress import Progress
from dray.config import mirrors
from dray.config.image import Image, Source
from dray.contract.findings import ConfigError, UnfitError

_TIMEOUT_S = 60
_LARGEST = 512 << 20  # bytes, packed or not: what is fetched is checked only once it is on the disk


def fetch(image: Image, *, folder: Path, own: Path | None = None, say: Callable[[str], None]) -> list[Path]:
    """The uncompressed tar of each source: from the user's `own` folder, from `folder`, or from its URL."""
    return [_fetched(source, image, folder, own, say) for source in image.source]


def _fetched(source: Source, image: Image, folder: Path, own: Path | None, say: Callable[[str], None]) -> Path:
    kept = folder / source.file
    if kept.is_file() and _digest(kept) == source.sha256:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".new-") as made:
        tar = Path(made) / source.file
        brought = [own / f"{source.file}{ending}" for ending in (".gz", "")] if own else []
        file = next((path for path in brought if path.is_file()), None)
        if file is None:
            say(f"dray: fetch {mirrors.url(source.url)}")
            file = Path(made) / f"{source.file}.gz"
            _download(source, image, file, say)
            _unpack(source, file, tar, where=mirrors.url(source.url))
        else:
            _unpack(source, file, tar, where=str(file))
        return tar.replace(kept)


def _download(source: Source, image: Image, out: Path, say: Callable[[str], None]) -> None:
    """Use urllib, which reads the proxies' variables, with the host's certificates."""
    trusted = ssl.create_default_context(cafile=builder.certificates())
    address = mirrors.url(source.url)
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S, context=trusted) as answer, out.open("wb") as file:  # noqa: S310  http or https, as descriptions and mirrors demand
            fetch = Progress(source.file, total=int(answer.headers.get("Content-Length") or 0), say=say)
            _copy(source, answer, file, where=address, at=fetch.at)
    except (OSError, HTTPException, ValueError) as error:  # refused, timed out, not found, or no sense in a header
        raise UnfitError(
            "a source archive of the image cannot be fetched",
            where=address,
            wanted=f"{source.file}.gz",
            found=str(error),
            fix=f"if only a mirror can be reached, name it below [mirrors] in {mirrors.path()}\n"
            f"or put that file into a folder: make image-{image.variant} WHEELS=FOLDER\n"
            f"or, without a network, make a bundle on a machine with one: dray image bundle {image.variant}",
        ) from error


def _unpack(source: Source, file: Path, tar: Path, *, where: str) -> None:
    """Unpack the tar; refuse one that is not pinned, or that has files outside its own folder."""
    packed = file.suffix == ".gz"
    try:
        with gzip.open(file) if packed else file.open("rb") as read, tar.open("wb") as out:
            _copy(source, read, out, where=where)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            "a source archive is not complete", where=where, found=str(error), fix=_again(source)
        ) from error
    if (found := _digest(tar)) != source.sha256:
        raise ConfigError(
            "a source archive is not the pinned one",
            where=where,
            wanted=f"sha256 {source.sha256}, of the uncompressed tar",
            found=f"sha256 {found}",
            fix=_again(source),
        )
    require_contained(tar, source)


def _copy(
    source: Source,
    read: BufferedIOBase,
    out: IO[bytes],
    *,
    where: str,
    at: Callable[[int], None] = lambda _: None,
) -> None:
    while piece := read.read(1 << 20):
        out.write(piece)
        at(out.tell())
        if out.tell() > _LARGEST:
            found = f"more than {_LARGEST} bytes"
            raise ConfigError(
                "a source archive is larger than any release", where=where, found=found, fix=_again(source)
            )


def _again(source: Source) -> str:
    return f"fetch the file again from {source.url}, or remove it from the folder"


def require_contained(tar: Path, source: Source) -> None:
    """Refuse a tar that writes or links outside the folder NAME-VERSION."""
    top = f"{source.name}-{source.version}"
    try:
        with tarfile.open(tar, "r:") as opened:
            strange = [member.name for member in opened if not _is_contained(member, top)]
    except tarfile.TarError as error:
        raise ConfigError(
            "a source archive is not a tar", where=source.url, found=str(error), fix="pin another release"
        ) from error
    if strange:
        raise ConfigError(
            "a source archive has entries that dray does not unpack",
            where=source.url,
            wanted=f"only files, folders and links in {top}/",
            found="\n".join(strange[:10]),
            fix="pin another release",
        )


def _is_contained(member: tarfile.TarInfo, top: str) -> bool:
    names = [member.name]
    if member.issym():
        names.append(posixpath.join(posixpath.dirname(member.name), member.linkname))
    elif member.islnk():
        names.append(member.linkname)
    elif not (member.isfile() or member.isdir()):
        return False
    return ".." not in member.name.split("/") and all(posixpath.normpath(name).split("/")[0] == top for name in names)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
