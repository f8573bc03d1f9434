"""Where a variant's image is: the SIF in build/, or the tag in Docker or Podman."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dray import engines
from dray.config.dray_home import root
from dray.config.image_definition import ACCELERATORS, ADOPTED
from dray.contract.files import open_regular, read
from dray.contract.findings import ConfigError, UnfitError, listed, nearest
from dray.images import adopted_folder
from dray.images.sif import record, verify
from dray.images.sif.format import MAGIC

_SIF = "sif"
# In an image of ours below sys.prefix; an adopted one is in a folder with it.
_DESCRIBED = adopted_folder.DESCRIBED
_LAUNCHERS = ("accelerate", "deepspeed", "ray")
_NOBODY = "owner 65534, "


def docker_tag(variant: str) -> str:
    """The name that `make image-VARIANT-docker` gives."""
    return f"dray:{variant}"


def in_engine(engine: str, variant: str) -> str:
    """The image's name in Docker or Podman. It must exist: they would ask a registry, which never had it."""
    from dray.clients import engine_store  # noqa: PLC0415  the Docker SDK, which a job's plan need not load

    tag = engines.get(engine).store_prefix + docker_tag(variant)
    if not engine_store.find(engine, docker_tag(variant)):
        raise ConfigError(
            "the image does not exist",
            wanted=f"{tag} in {engine.capitalize()}",
            fix=f"dray image build {variant} --format {engine}",
        )
    return tag


def bare_python() -> str:
    """The Python that runs dray. It must have torch."""
    if find_spec("torch") is None:
        raise UnfitError(
            "this Python cannot train",
            where=sys.executable,
            wanted="torch and transformers",
            fix="make demo installs them into .venv; or use --engine docker",
        )
    return sys.executable


def sif(checkout: Path, variant: str) -> Path:
    """The file that `make image-VARIANT` makes."""
    return checkout / "build" / f"dray-{variant}.sif"


def adopted(checkout: Path, name: str) -> Path:
    """The adopted image of this name, or the one that was adopted from this absolute path."""
    folder = adopted_folder.find(_homes(checkout), name)
    folder = folder or checkout / "build" / f"dray-{name.strip('/').replace('/', '-')}"
    return folder / adopted_folder.IMAGE


def adopted_names(checkout: Path) -> list[str]:
    """The names of all adopted images."""
    found = (file for home in _homes(checkout) for file in home.glob(f"dray-*/{_DESCRIBED}"))
    return sorted(file.parent.name.removeprefix("dray-") for file in found)


def _homes(checkout: Path) -> tuple[Path, ...]:
    """The folders of adopted images. A job that may not write the checkout puts them beside the runs."""
    return checkout / "build", Path(os.environ.get("DRAY_RUNS", "runs")).absolute() / ".adopted"


def stat(file: Path) -> str:
    """A file's owner, inode, size and time, as `stat --format` writes them in slurm/adopt.sh."""
    seen = file.stat()
    seconds, rest = divmod(seen.st_mtime_ns, 10**9)
    return f"owner {seen.st_uid}, inode {seen.st_ino}, {seen.st_size} bytes, changed {seconds}.{rest:09}"


def require_unchanged(image: Path) -> None:
    """Refuse an adopted image whose file has changed since it was adopted."""
    described = _described(image)
    if not described:
        return
    source = image.with_name(adopted_folder.SOURCE)
    file = source if source.is_symlink() else image
    named = os.readlink(source) if source.is_symlink() else described["source"]  # noqa: PTH115
    wanted = described["file"]
    try:
        found = stat(file)
    except OSError as error:
        found = error.strerror or str(error)
    if found.startswith(_NOBODY):  # in an unprivileged container other users have no id
        found, wanted = (text.partition(", ")[2] for text in (found, wanted))
    if found != wanted:
        raise ConfigError(
            "the image was changed since it was adopted",
            where=named,
            wanted=wanted,
            found=found,
            fix=f"dray image adopt {shlex.quote(named)} --name {described['name']} --force",
        )


def layer(checkout: Path, variant: str, name: str) -> Path:
    """The file that `dray image layer` makes for a name; a name that ends in .sif is the file itself."""
    return Path(name) if name.endswith(".sif") else checkout / "build" / f"dray-{variant}-{name}.sif"


def named(checkout: Path, image: str) -> Path:
    """The file of the image that a user names by its path, as a variant, or as an adopted image."""
    if image in ACCELERATORS:
        return sif(checkout, image)
    theirs = adopted(checkout, image) if re.fullmatch(ADOPTED, image) else Path(image)
    return theirs if not Path(image).exists() and theirs.exists() else Path(image)


def failed(checkout: Path, variant: str) -> Path:
    """The sandbox of the last build that failed."""
    return checkout / "build" / "failed" / variant


def job_file(checkout: Path, variant: str, engine: str = "apptainer") -> Path:
    """The image that a job starts: DRAY_IMAGE, else the variant's own, in the format of the engine."""
    named = os.environ.get("DRAY_IMAGE")
    file = sif(checkout, variant) if variant in ACCELERATORS else adopted(checkout, variant)
    starter = engines.get(engine)
    if starter.image == "store":
        return Path(named or starter.store_prefix + docker_tag(variant))
    return Path(named or (file if _SIF in starter.formats else file.with_suffix(".sqsh"))).absolute()


def absent(image: Path, variant: str, engine: str) -> str:
    """The command that makes a missing image; empty if it exists, or if only the nodes can tell."""
    starter = engines.get(engine)
    if starter.image == "store" or image.exists():
        return ""
    if variant not in ACCELERATORS:
        return f"dray image adopt SOURCE --name {variant}"
    if _SIF in starter.formats:
        return f"make image-{variant}"
    return "convert dray's image: docs/reference/engines.md"


def require_adopted(checkout: Path, name: str, image: Path) -> None:
    """Refuse an adopted image that is missing, or whose file has changed."""
    if name in ACCELERATORS or image.suffix != f".{_SIF}":
        return
    if image.exists() or image.is_symlink():
        require_unchanged(image)
        return
    names = adopted_names(checkout)
    if near := nearest(name, names):
        fix = f"adopted={near}"
    else:
        fix = f"dray image adopt {shlex.quote(name)}" if "/" in name else f"dray image adopt SOURCE --name {name}"
    raise ConfigError(
        f"there is no adopted image {name}" if "/" not in name else "the image is not adopted yet",
        where=checkout / "build" if "/" not in name else name,
        wanted=f"one of {listed(names)}" if names else "",
        fix=fix,
    )


def described(image: Path) -> dict[str, str]:
    """What a plan needs to know of an adopted image: its folder, origin and PYTHONPATH. Empty for other images."""
    found = _described(image)
    if not found:
        return {}
    folder, source = image.absolute().parent, root() / "src"
    return {
        "adopted": str(folder),
        "adopted_from": found["source"],
        "adopted_source": str(source),
        "adopted_path": adopted_folder.python_path(folder, source, found["pythonpath"]),
        "adopted_lacks": " ".join(name for name in _LAUNCHERS if name not in found.get("packages", _LAUNCHERS)),
        "image_variant": found["variant"],
    }


def _described(image: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(read(image.absolute().with_name(_DESCRIBED)))
        found["source"], found["file"], found["pythonpath"], found["variant"], found["name"]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # others may have such a file
        return {}
    return found


def within(image: Path) -> dict[str, str]:
    """What the planner knows of the image that it runs in: the variant, or all that `described` has."""
    return described(image) or {"image_variant": variant()}


def variant(image: Path | None = None) -> str:
    """The variant of a file, or of the image that this program runs in; empty if there is no record of it."""
    if image is None:
        try:
            found = json.loads((Path(sys.prefix) / _DESCRIBED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""  # the image's own checks report damage
        return str(found.get("variant", ""))
    known = record.read(image)
    return known.variant if known else ""


def required(checkout: Path, variant: str, digest: str | None = None, engine: str = "apptainer") -> Path:
    """`job_file`, checked before a job is queued: it exists, and it is what the recipe and the engine want."""
    file, starter = job_file(checkout, variant, engine), engines.get(engine)
    require_adopted(checkout, variant, file)
    if fix := absent(file, variant, engine):
        fix += ", or set DRAY_IMAGE to an image that dray has built"
        raise ConfigError("the image does not exist", wanted=f"{file} (the recipe's image is {variant})", fix=fix)
    if not starter.formats:
        return file
    head = _head(file)
    kind = "folder" if file.is_dir() else _SIF if MAGIC in head else "squashfs" if head.startswith(b"hsqs") else ""
    if not kind:
        raise ConfigError(
            "the file is not an image",
            where=file,
            wanted="a SIF, as make image-VARIANT builds it, or a squashfs",
            found="an empty file" if not head else ascii(head[:16].decode("latin-1")),
            fix=f"make image-{variant}, or copy the file again: it may be incomplete",
        )
    if kind not in starter.formats:
        raise ConfigError(
            f"{engine} does not start an image of this kind",
            where=file,
            wanted=" or ".join(starter.formats),
            found=kind,
            fix="set DRAY_IMAGE to an image in this engine's format: docs/reference/engines.md",
        )
    if digest:
        verify.require(file, digest, "the recipe's image_digest")
    return file


def _head(file: Path) -> bytes:
    if file.is_dir():
        return b""
    with open_regular(file) as stream:
        return stream.read(64)
