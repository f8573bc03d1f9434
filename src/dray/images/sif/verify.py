"""Check that an image has the digest that it must have."""

from __future__ import annotations

import re
from pathlib import Path

from dray.contract.findings import ConfigError
from dray.images.sif import record


def digest(path: Path) -> str:
    """The identity of an image: SHA-256 of the whole file."""
    return f"sha256:{record.File.of(path).sha256}"


def expected(path: Path, given: str | None = None) -> tuple[str, str]:
    """The digest that this image must have, and its source: the user, or the record beside it."""
    if given:
        if not re.fullmatch("sha256:[0-9a-f]{64}", given):
            raise ConfigError("not a digest", wanted="sha256: and 64 hexadecimal digits", found=given)
        return given, "--digest"
    recorded = record.read(path)
    if recorded:
        return f"sha256:{recorded.sif.sha256}", str(record.path_for(path))
    raise ConfigError(
        "no digest to verify the image against",
        where=path,
        wanted=f"--digest, or the record {record.path_for(path)}",
        fix="copy the record with the image, or ask the person who built it for the digest",
    )


def require(path: Path, expected_digest: str, source: str) -> str:
    """Return the image's digest; refuse any other than the expected one."""
    found = digest(path)
    if found != expected_digest:
        raise ConfigError(
            "the image has another digest",
            where=path,
            wanted=f"{expected_digest} ({source})",
            found=found,
            fix="copy or build it again: the file is another image, or was changed or damaged",
        )
    return found
