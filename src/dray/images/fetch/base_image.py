"""The base of an image: once fetched a file of this machine, the same one however the user names it."""

from __future__ import annotations

import re
from pathlib import Path

from dray.clients import apptainer, builder
from dray.clients.progress import Say
from dray.config import mirrors
from dray.contract.findings import ConfigError
from dray.images.fetch import sha256
from dray.images.locks import lock
from dray.images.sif import format as sif_format

_MAKE = "containers/base/make-base.sh bookworm build/base/bookworm.tar"


def default(checkout: Path, pinned: str, *, say: Say) -> str:
    """The default base: the one that make-base.sh made in this checkout, else the pinned one."""
    made = builder.made_base(checkout, "bookworm")
    if made:
        say(f"dray: base {made}, made by make-base.sh (--base names another)")
    return str(made or pinned)


def local(base: str) -> Path | None:
    """The base's file if it is written as a path, which must exist."""
    path = Path(base).expanduser().resolve()
    if path.is_file():
        if path.suffix == ".sif":
            sif_format.require_machine(path, what="base", where=base, fix=f"make one: {_MAKE}")
        return path
    if path.exists() or base.startswith(("/", ".", "~")) or path.suffix in (".tar", ".sif"):
        raise ConfigError(
            "the base is a folder" if path.is_dir() else "the base does not exist",
            wanted="an image reference, a SIF, or the tar of a root filesystem",
            found=base,
            fix=f"tar --create --file base.tar --directory {base} ." if path.is_dir() else f"make one: {_MAKE}",
        )
    return None


def fetched(checkout: Path, base: str, *, say: Say) -> Path:
    """The base's file: the user's own tar or SIF, or the image of a reference, which is pulled once."""
    if path := local(base):
        return path
    pulled = checkout / "build" / "base" / f"{lock.digest(base)}.sif"
    if not pulled.exists():
        source = reference(base)
        say(f"dray: pull {source.removeprefix('docker://')}")
        pulled.parent.mkdir(parents=True, exist_ok=True)
        apptainer.pull(source, pulled, what="the base", instead=f"or make one: {_MAKE}", say=say)
    return pulled


def identity(base: str, file: Path) -> str:
    """A base's identity, without a path: the reference with its digest, or the file's digest."""
    if "@sha256:" in base and not local(base):
        return base
    return f"sha256:{sha256(file)}"


def reference(base: str) -> str:
    """The reference for Apptainer, without a tag if it has a digest: Apptainer refuses both together.

    It names the user's mirror, if there is one.
    """
    found = mirrors.image(re.sub(r":[^:/@]+(?=@)", "", base))
    return found if "://" in found else f"docker://{found}"
