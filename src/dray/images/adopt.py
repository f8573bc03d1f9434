"""Adopt an image that dray did not build: start it once, and write a folder with a link to it and a record."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dray
from dray import interrupts, process
from dray.clients import apptainer, builder_container
from dray.clients.progress import Say
from dray.config import mirrors
from dray.contract.findings import ConfigError, UnfitError
from dray.images import adopted_folder, bundle, store
from dray.images.fetch import sha256
from dray.images.locks import lock
from dray.images.sif import format as sif_format

# What dray's own trainer needs, in the oldest version that it supports; `dray image adopt` notes what is missing.
_TRAINER: dict[str, tuple[int, ...]] = {
    "torch": (2, 8),
    "transformers": (5,),
    "safetensors": (),
    "tokenizers": (),
    "numpy": (),
    "pyarrow": (),
}
_START_S = 600.0  # a first start may unpack gigabytes, and import torch from a network disk
_PROBE = Path(dray.__file__).parent / "checks" / "list_packages.py"


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """An adopted image, as `dray image adopt` prints it."""

    file: Path
    variant: str
    digest: str
    versions: dict[str, str]
    brought: tuple[str, ...]
    """Packages that dray added beside the image, with their versions."""
    lacks: tuple[str, ...]
    """What dray's own trainer needs and the image lacks; the user's own script may not need it."""


def adopt(checkout: Path, source: str, *, name: str = "", force: bool = False, say: Say = print) -> Adopted:
    """Make the folder build/dray-NAME, as slurm/adopt.sh does on a node. A failure leaves nothing."""
    # A container starts elsewhere.
    source = re.sub("^(oci|oci-archive|docker-archive):(?!/)", lambda kind: f"{kind[0]}{Path.cwd()}/", source)
    name = name or adopted_folder.named(source)
    adopted_folder.require_name(name)
    build = checkout / "build"
    folder = build / f"dray-{name}"
    if folder.exists() and not force:
        raise ConfigError(
            "there is an image of this name",
            where=folder,
            fix=f"choose another name (--name {name}-2), or replace the image (--force)",
        )
    builder_container.write_for_all()
    build.mkdir(exist_ok=True)
    # A refusal keeps what took hours to fetch.
    address = mirrors.image(source) if "://" in source else source
    kept = build / "fetched" / f"{lock.digest(address)}.sif"
    if force:
        kept.unlink(missing_ok=True)
    with interrupts.stoppable(), TemporaryDirectory(dir=build, prefix=".adopt-") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        image = new / adopted_folder.IMAGE
        where = _put(source, address, image, kept, say)
        link = image.with_name(adopted_folder.SOURCE)
        file = store.stat(link if link.is_symlink() else image)
        fix = "take the image for this machine's architecture, or adopt this one on a machine that it fits"
        sif_format.require_machine(image, what="image", where=source, fix=fix)
        say(f"dray: read {image.stat().st_size / 1e6:,.0f} MB for the digest")
        digest = sha256(image)
        say("dray: start the image to see what it has")
        try:
            found = probe(image, source)
        except UnfitError:  # the fetched file may be damaged
            kept.unlink(missing_ok=True)
            raise
        say("dray: add the packages that the image lacks")
        start = partial(inside, image, [new, checkout / "src"])
        brought = adopted_folder.fill(
            new, found, name=name, source=where, file=file, sha256=digest, checkout=checkout, start=start
        )
        with interrupts.held_back():
            if folder.exists():
                folder.rename(Path(scratch) / "old")
            new.rename(folder)
        kept.unlink(missing_ok=True)
    return Adopted(
        file=folder / adopted_folder.IMAGE,
        variant=adopted_folder.variant(found["torch"]),
        digest=f"sha256:{digest}",
        versions=adopted_folder.versions(found),
        brought=brought,
        lacks=tuple(_lacking(found["packages"])),
    )


def probe(image: Path, source: str) -> dict[str, Any]:
    """What the image's own Python reports. An image without Python, or one that does not start, is refused."""
    # --contain: the image is unknown, so it gets a /tmp of its own.
    code = _PROBE.read_text(encoding="utf-8")
    done = apptainer.execute(image.resolve(), ["python3", "-c", code], options=["--contain"], seconds=_START_S)
    last = adopted_folder.last_lines(done)
    if '"python3": executable file not found' in done.err or done.code == 127:
        raise ConfigError(
            "the image has no Python",
            where=source,
            wanted="python3 on the image's PATH",
            found=last,
            fix="take an image with Python 3.11 or newer and torch, with that Python on its PATH",
        )
    try:
        found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
        found["python"], found["libc"], found["pythonpath"], found["packages"].keys(), found["torch"].keys()
    except (LookupError, ValueError, TypeError, AttributeError):
        raise UnfitError(
            "the image does not start", where=source, found=last or f"exit code {done.code}",
            fix="copy or pull the image again: it may be damaged; apptainer exec IMAGE true shows more",
        ) from None  # fmt: skip
    return found


def _put(source: str, address: str, image: Path, kept: Path, say: Say) -> str:
    """Link the image, copy it if others may write it, or fetch it. Returns its absolute path or its address."""
    path = Path(source).expanduser()
    if path.exists():
        _use(path.absolute(), image, say)
        return str(path.absolute())
    if not re.match(r"[a-z-]+:", source):
        raise ConfigError(
            "the image does not exist", where=path.absolute(), found=source, fix="correct the path",
            wanted="a SIF, docker://NAME, oras://NAME, oci:FOLDER, oci-archive:FILE or docker-archive:FILE",
        )  # fmt: skip
    if kept.exists():
        say(f"dray: use the image that was fetched before ({kept}; remove it to fetch again)")
    else:
        say(f"dray: fetch {source}, which takes minutes")
        kept.parent.mkdir(exist_ok=True)
        instead = "or bring it as a file: dray image adopt FILE.sif"
        apptainer.pull(address, kept, what="the image", instead=instead, say=say)
    bundle.link(kept, image)
    return source


def _use(path: Path, image: Path, say: Say) -> None:
    """Link or copy the user's own image."""
    try:
        sif_format.read(path)
    except ConfigError as error:
        if not error.finding.fix:
            error.amend(fix="for an archive or a folder of OCI: docker-archive:FILE, oci-archive:FILE or oci:FOLDER")
        raise
    above = stat.S_IMODE(path.resolve().parent.stat().st_mode)
    adopted_folder.put(path, image.parent, above, say)


def _lacking(packages: Mapping[str, str]) -> Iterator[str]:
    for name, oldest in _TRAINER.items():
        version = packages.get(name, "none")
        if name not in packages or adopted_folder.numbers(version) < oldest:
            wanted = f" {'.'.join(map(str, oldest))} or newer" if oldest else ""
            yield f"{name}{wanted}: the image has {version}"


def inside(image: Path, folders: Sequence[Path], arguments: Sequence[str], path: str) -> process.Done:
    """Start Python with this PYTHONPATH in an adopted image that sees `folders`, the packages beside it among them."""
    mounts = []
    for folder in folders:
        quoted = str(folder).replace('"', '""')
        mounts.append(f'--mount=type=bind,"src={quoted}","dst={quoted}",ro')
    argv = ["env", f"PYTHONPATH={path}", "python3", *arguments]
    binds = dict.fromkeys(folders, False)
    return apptainer.execute(image.resolve(), argv, options=["--contain", *mounts], binds=binds, seconds=_START_S)
