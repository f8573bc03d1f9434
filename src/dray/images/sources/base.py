"""The base of an image: once fetched a file of this machine, the same one however the user names it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from dray.clients import apptainer, builder
from dray.config import mirrors
from dray.contract.findings import ConfigError

_MAKE = "containers/base/make-base.sh bookworm build/base/bookworm.tar"


def default(checkout: Path, pinned: str, *, say: Callable[[str], None]) -> str:
    """The default base: the one that make-base.sh made in this checkout, else the pinned one."""
    made = builder.made_base(checkout, "bookworm")
    if made:
        say(f"dray: base {made}, made by make-base.sh (--base names another)")
    return str(made or pinned)


def require(base: str) -> None:
    """Refuse a base that is written as a path and is not a file."""
    path = Path(base).expanduser().resolve()
    if path.is_file():
        return
    if path.exists() or base.startswith(("/", ".", "~")) or path.suffix in (".tar", ".sif"):
        raise ConfigError(
            "the base is a folder" if path.is_dir() else "the base does not exist",
            wanted="an image reference, a SIF, or the tar of a root filesystem",
            found=base,
            fix=f"tar --create --file base.tar --directory {base} ." if path.is_dir() else f"make one: {_MAKE}",
        )


def fetched(checkout: Path, base: str, *, say: Callable[[str], None]) -> Path:
    """The base's file: the user's own tar or SIF, or the image of a reference, which is pulled once."""
    require(base)
    path = Path(base).expanduser().resolve()
    if path.is_file():
        return path
    pulled = checkout / "build" / "base" / f"{hashlib.sha256(base.encode()).hexdigest()[:16]}.sif"
    if not pulled.exists():
        source = reference(base)
        say(f"dray: pull {source.removeprefix('docker://')}")
        pulled.parent.mkdir(parents=True, exist_ok=True)
        apptainer.pull(source, pulled, what="the base", instead=f"or make one: {_MAKE}", say=say)
    return pulled


def identity(base: str, file: Path) -> str:
    """A base's identity, without a path: the reference with its digest, or the file's digest."""
    if not Path(base).expanduser().exists() and "@sha256:" in base:
        return base
    with file.open("rb") as opened:
        return f"sha256:{hashlib.file_digest(opened, 'sha256').hexdigest()}"


def reference(base: str) -> str:
    """The reference for Apptainer, without a tag if it has a digest: Apptainer refuses both together.

    It names the user's mirror, if there is one.
    """
    found = mirrors.image(re.sub(r":[^:/@]+(?=@)", "", base))
    return found if "://" in found else f"docker://{found}"
