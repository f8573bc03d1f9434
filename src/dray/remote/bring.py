"""Copy an image, dray's scripts and a recipe to a remote, unless a file with the same digest is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from dray.contract.findings import ConfigError, UnfitError
from dray.images.sif import verify
from dray.remote.parcel import Parcel
from dray.remote.ssh import Brought, Connection

_BLOCK = 1 << 20


def bring(
    connection: Connection, image: Path, say: Callable[[str], None], dray: Parcel, recipe: Parcel | None = None
) -> Brought:
    """Copy what is missing there. Later verbs use this image and these scripts."""
    digest = verify.digest(image).removeprefix("sha256:")
    path, item = connection.remote.path, f"images/{digest}.sif"
    parcels = [dray, recipe] if recipe else [dray]
    items = [*(one.item for one in parcels), item]
    found = dict(zip(items, connection.ask("has", path, *items).splitlines(), strict=False))
    names = {one: _name(one, found.get(one, "")) for one in items}
    for one in parcels:
        if found[one.item].startswith("missing"):
            sha256 = one.item.partition("/")[2]
            connection.ask("receive", path, names[one.item], str(len(one.data)), sha256, feed=[one.data])
    if found[item].startswith("missing"):
        size = image.stat().st_size
        say(f"copying {image.name}, {size / 1e6:,.1f} MB, to {connection.remote.place}")
        connection.ask("receive", path, item, str(size), digest, feed=_blocks(image, size))
    connection.ask("keep", path, names[dray.item], item)
    return Brought(names[dray.item], item, names[recipe.item] if recipe else "")


def _name(item: str, answer: str) -> str:
    """The item, or the item with a number: a job may have changed the first copy."""
    if not re.fullmatch(rf"(here|missing) {re.escape(item)}(-[0-9]+)?", answer):
        raise UnfitError(
            "the remote gave an unexpected answer", wanted=f"here or missing, and {item}", found=ascii(answer)
        )
    return answer.partition(" ")[2]


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            while size > 0 and (block := stream.read(min(size, _BLOCK))):
                size -= len(block)
                yield block
    except OSError as error:
        raise UnfitError("the image cannot be read", where=file, found=error.strerror or error) from error
    # A file that has become shorter: the other end waits for the rest, and knows the digest.
    while size > 0:
        yield bytes(min(size, _BLOCK))
        size -= _BLOCK


def require_sif(image: Path) -> Path:
    """The image, if it is a SIF, which dray can copy; else refuse it."""
    if image.suffix != ".sif" or not image.is_file():
        raise ConfigError(
            "dray copies only a SIF to a remote",
            found=image,
            wanted="a SIF",
            fix="set DRAY_IMAGE to a SIF, or make image-cpu",
        )
    return image
