"""Whether an image is the one that it should be."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from dray.config.model import load
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.images.sif import record


def digest(path: Path) -> str:
    """The identity of an image: SHA-256 of the whole file."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def wanted(path: Path, *, said: str | None = None, recipe: Path | None = None) -> tuple[str, str]:
    """The digest that this image must have, and who says so: the user, the recipe, or the record beside it."""
    if said:
        if not re.fullmatch("sha256:[0-9a-f]{64}", said):
            raise ConfigError("this is no digest", wanted="sha256: and 64 hexadecimal digits", found=said)
        return said, "--digest"
    if recipe:
        pinned = load(Recipe, recipe).image_digest
        if not pinned:
            raise ConfigError(
                "the recipe says no image_digest",
                where=recipe,
                wanted="the digest that the image must have",
                found=f"the image here: {path}",
                fix=f'put image_digest = "{digest(path)}" into it, or leave out --recipe',
            )
        return pinned, f"image_digest of {recipe}"
    known = record.read(path)
    if known:
        return f"sha256:{known.sif.sha256}", str(record.path_for(path))
    raise ConfigError(
        "nothing says which digest this image should have",
        where=path,
        wanted=f"--digest, image_digest in the recipe (--recipe), or the record {record.path_for(path)}",
        fix="copy the record along with the image, or ask who built it for the digest",
    )


def require(path: Path, digest_wanted: str, source: str) -> str:
    """The image's digest, which must be this one."""
    found = digest(path)
    if found != digest_wanted:
        raise ConfigError(
            "this is not the image that it should be",
            where=path,
            wanted=f"{digest_wanted} ({source})",
            found=found,
            fix="copy or build it again; it is another image, or was changed or damaged since",
        )
    return found
