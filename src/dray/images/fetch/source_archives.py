"""Source archives that a build compiles: pinned tars of releases, which the host fetches or the user brings."""

from __future__ import annotations

import gzip
import shutil
import ssl
import urllib.request
import zlib
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

from dray.clients import builder
from dray.clients.progress import Say
from dray.config import mirrors
from dray.config.image_definition import Image, SourceArchive
from dray.contract.findings import ConfigError, UnfitError
from dray.images.fetch import sha256
from dray.images.fetch.pip import elsewhere

_TIMEOUT_S = 60


def fetch(image: Image, *, folder: Path, own: Path | None = None, say: Say) -> list[Path]:
    """The uncompressed tar of each source archive: from the user's `own` folder, from `folder`, or from its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_fetched(source, image, folder, own, say) for source in image.source]


def _fetched(source: SourceArchive, image: Image, folder: Path, own: Path | None, say: Say) -> Path:
    kept = folder / source.file
    if kept.is_file() and sha256(kept) == source.sha256:
        return kept
    brought = own / f"{source.file}.gz" if own else None
    if brought and brought.is_file():
        url = brought.absolute().as_uri()
    else:
        url = mirrors.url(source.url)
        say(f"dray: fetch {url}")
    with TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
        tar = Path(scratch) / source.file
        # urllib reads the proxies' variables.
        trusted = ssl.create_default_context(cafile=builder.certificates())
        try:
            with (
                urllib.request.urlopen(url, timeout=_TIMEOUT_S, context=trusted) as answer,  # noqa: S310  http, https or that file
                gzip.open(answer) as packed,
                tar.open("wb") as out,
            ):
                shutil.copyfileobj(packed, out)
        except (OSError, EOFError, HTTPException, ValueError, zlib.error) as error:  # ValueError: a senseless header
            raise UnfitError(
                "a source archive of the image cannot be fetched",
                where=url,
                wanted=f"{source.file}.gz",
                found=str(error),
                fix=elsewhere(source.url, image.variant),
            ) from error
        digest = sha256(tar)
        if digest != source.sha256:
            raise ConfigError(
                "a source archive is not the pinned one",
                where=url,
                wanted=f"sha256 {source.sha256}, of the uncompressed tar",
                found=f"sha256 {digest}",
                fix=f"fetch the file again from {source.url}, or remove it from the folder",
            )
        return tar.replace(kept)
