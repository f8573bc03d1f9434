"""Bring an image, dray's scripts and a recipe to a remote; what is there already by its digest stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from dray.contract.findings import ConfigError
from dray.images.sif import verify
from dray.remote.parcel import Parcel
from dray.remote.ssh import Connection

_BLOCK = 1 << 20


def bring(connection: Connection, image: Path, parcels: list[Parcel], say: Callable[[str], None]) -> None:
    """All that is missing there. `parcels` begin with dray's own; later verbs use it and the image."""
    digest = verify.digest(image).removeprefix("sha256:")
    item, path = f"images/{digest}.sif", connection.remote.path
    missing = connection.ask("has", path, item, *(one.item for one in parcels)).splitlines()
    for one in parcels:
        if one.item in missing:
            name = one.item.partition("/")[2]
            connection.ask("receive", path, one.item, str(len(one.data)), name, feed=[one.data])
    if item in missing:
        size = image.stat().st_size
        say(f"bringing {image.name}, {size / 1e6:,.1f} MB, to {connection.remote.place}")
        connection.ask("receive", path, item, str(size), digest, feed=_blocks(image, size))
    connection.ask("keep", path, parcels[0].item, item)


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while size > 0 and (block := stream.read(min(size, _BLOCK))):
            size -= len(block)
            yield block
    # A file that has become shorter: the other end waits for the rest, and knows the digest.
    while size > 0:
        yield bytes(min(size, _BLOCK))
        size -= _BLOCK


def require_sif(image: Path) -> Path:
    """The image, if it is a file that can be brought."""
    if image.suffix != ".sif" or not image.is_file():
        raise ConfigError(
            "only an image in a SIF is brought to a remote",
            found=image,
            wanted="a SIF",
            fix="set DRAY_IMAGE to one, or make image-cpu",
        )
    return image
