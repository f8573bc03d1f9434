"""All that a build reads, in one folder: /mnt of an Apptainer build, the context of a Docker build."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from dray.clients import builder, docker
from dray.clients.progress import Say
from dray.config import mirrors
from dray.config.image_definition import Image
from dray.config.load_toml import load
from dray.contract.findings import ConfigError, listed
from dray.images import bundle
from dray.images.bundle import link
from dray.images.fetch import base_image, debs, source_archives, wheels
from dray.images.locks import lock

# What a build reads only after the step that compiles, 55-deepspeed.sh.
_LATER = re.compile(r"steps/(56-.*|[6-9]\d-.*|sbom\.py)|dray/.*|sources(/.*|\.json)|labels|Containerfile")

_README = """# The {variant} image of dray, to be built without a network

Made by `dray image bundle {variant}`. On a machine without a network, in a checkout of the same version of dray:

    make image-{variant} BUNDLE={folder}            # SIGNERS=FILE if it is signed: docs/images.md

With Apptainer alone, in this folder:

    {unpack}apptainer build --bind "$PWD:/mnt" --build-arg BASE={base} ../dray-{variant}.sif dray.def
{docker}
`sha256sum --check SHA256SUMS` checks that all files have arrived.
"""
_UNPACK = """mkdir base && tar --extract --file base.tar --directory base --exclude='./dev/*'
    """
# Docker takes no SIF as its base.
_DOCKER = """
With Docker alone, in this folder:

    docker import base.tar dray-base:bundle
    docker build --file Containerfile --network none --build-arg BASE=dray-base:bundle --tag dray:{variant} .
"""


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """The inputs of an image's build, and its base."""

    image: Image
    inputs: Path
    base: Path

    @cached_property
    def digest(self) -> str:
        """One digest of everything: the same digest gives the same image."""
        return _digest(self._sums)

    @cached_property
    def operators(self) -> str:
        """The digest of what DeepSpeed's operators are compiled from: all inputs but those that only later steps read.

        One input too many costs minutes of a compiler; one too few gives a wrong image.
        """
        return _digest({name: digest for name, digest in self._sums.items() if not is_later(name)})

    @cached_property
    def _sums(self) -> dict[str, str]:
        # image.env names the base; what a bundle adds otherwise is not part of the image.
        only_bundles = (bundle.README, bundle.BUILDER, "base.tar", "base.sif")
        return {name: digest for name, digest in bundle.sums(self.inputs).items() if name not in only_bundles}


def is_later(name: str) -> bool:
    """Whether only steps after the one that compiles read this input."""
    return bool(_LATER.fullmatch(name))


def image(checkout: Path, variant: str) -> Image:
    """The description of a variant."""
    variants = sorted(path.parent.name for path in (checkout / "containers").glob("*/image.toml"))
    if variant not in variants:
        raise ConfigError("no such image", where=checkout / "containers", wanted=listed(variants), found=variant)
    return load(Image, checkout / "containers" / variant / "image.toml")


def gather(
    checkout: Path,
    variant: str,
    *,
    base: str | None = None,
    own_wheels: Path | None = None,
    as_locked: bool = True,
    say: Say,
) -> BuildContext:
    """Fetch what is missing, and write the folder of inputs again from the checkout."""
    described = image(checkout, variant)
    chosen = base or base_image.default(checkout, described.base, say=say)
    # A typing error is reported before gigabytes are fetched.
    base_image.local(chosen)
    mirrors.table()
    lock.require_fresh(checkout, described)
    build = checkout / "build"
    with alone(build):
        folder = build / "wheels"
        say("dray: wheels")
        fetched = wheels.fetch(
            locks=lock.of(checkout, described), image=described, folder=folder, wheels=own_wheels, say=say
        )
        tars = source_archives.fetch(described, folder=build / "sources", own=own_wheels, say=say)
        own = wheels.own(checkout=checkout, folder=folder / "dray")
        file = base_image.fetched(checkout, chosen, say=say)
        identity = base_image.identity(chosen, file)
        packages = debs.fetch(checkout, base=file, identity=identity, as_locked=as_locked, say=say)
        laid = lay_out(checkout, described, fetched=fetched, tars=tars, own=own, packages=packages, base=identity)
    return BuildContext(image=described, inputs=laid, base=file)


def from_bundle(checkout: Path, folder: Path, variant: str, *, signers: Path | None = None) -> BuildContext:
    """The inputs in a bundle. Refuses one that is not complete, is for another image, or is not signed by `signers`."""
    folder = folder.expanduser().resolve()
    bundle.require(folder, checkout, signers)
    bundled = facts(folder)["DRAY_VARIANT"]
    if bundled != variant:
        raise ConfigError("the bundle is for another image", where=folder, wanted=variant, found=bundled)
    return BuildContext(image=image(checkout, variant), inputs=folder, base=next(folder.glob("base.*")))


def to_bundle(checkout: Path, context: BuildContext, out: Path, *, key: Path | None, say: Say) -> Path:
    """Write the bundle `out`, signed if there is a key. A failure leaves nothing."""
    if out.exists():
        raise ConfigError("the bundle's folder exists already", where=out, fix="name another with --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    variant, packed = context.image.variant, context.base.suffix != ".sif"
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        shutil.copytree(context.inputs, folder, copy_function=link)
        link(context.base, folder / ("base.tar" if packed else "base.sif"))
        with builder.engine() as client:
            if client is not None:  # the other machine needs it too
                image = builder.image(client, checkout, say)
                with docker.attempt("write the builder to a file"), (folder / bundle.BUILDER).open("wb") as saved:
                    saved.writelines(client.images.get(image).save(named=builder.TAG))
        text = _README.format(
            variant=variant,
            folder=out.name,
            unpack=_UNPACK if packed else "",
            base="base" if packed else "base.sif",
            docker=_DOCKER.format(variant=variant) if packed else "",
        )
        (folder / bundle.README).write_text(text)
        (folder / bundle.SUMS).write_text(_lines(bundle.sums(folder)))
        if key:
            bundle.sign(folder, key)
        folder.replace(out)
    return out


@contextmanager
def alone(build: Path) -> Iterator[None]:
    """Let one build at a time change the fetched files, which all images share."""
    build.mkdir(exist_ok=True)
    with (build / ".fetch").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lay_out(
    checkout: Path,
    image: Image,
    *,
    fetched: Sequence[Path],
    tars: Sequence[Path] = (),
    own: Path,
    packages: Path,
    base: str,
) -> Path:
    """Write build/inputs/<variant>, as the steps, the definition and the Containerfile expect it."""
    containers = checkout / "containers"
    source = containers / image.variant
    folder = checkout / "build" / "inputs" / image.variant
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(containers / "steps", folder / "steps", ignore=shutil.ignore_patterns("__pycache__"))
    if image.source:
        (folder / "sources.json").write_text(json.dumps([source.model_dump() for source in image.source], indent=1))
    left_out = {debs.INSTALLED, *image.without}
    debian = [path for path in sorted(packages.iterdir()) if path.name.partition("_")[0] not in left_out]
    for name, files in (("wheels", fetched), ("sources", tars), ("debs", debian), ("dray", [own])):
        (folder / name).mkdir()
        for file in files:
            link(file, folder / name / file.name)
    for path in lock.of(checkout, image):
        shutil.copy2(path, folder)
    shutil.copy2(_recipe(source, f"dray-{image.variant}.def", containers / "dray.def"), folder / "dray.def")
    environment = environment_of(checkout, image)
    (folder / "environment").write_text(_assign(environment))
    (folder / "labels").write_text("".join(f"{key} {value}\n" for key, value in image.labels.items()))
    containerfile = _recipe(source, "Containerfile", containers / "Containerfile").read_text()
    containerfile += _docker("ENV", environment) + _docker("LABEL", image.labels)
    (folder / "Containerfile").write_text(containerfile)
    values = {
        "DRAY_VARIANT": image.variant,
        "DRAY_PYTHON": image.python,
        "DRAY_ACCELERATOR": image.accelerator,
        "DRAY_ARCHITECTURES": ";".join(image.architectures),
        "DRAY_DRIVER": image.driver or "",
        "DRAY_BASE": base,
        "SOURCE_DATE_EPOCH": str(lock.epoch(lock.of(checkout, image)[0])),
    }
    (folder / "image.env").write_text(_assign(values))
    return folder


def facts(folder: Path) -> dict[str, str]:
    """The values of image.env."""
    lines = shlex.split((folder / "image.env").read_text())
    return dict(line.split("=", 1) for line in lines)


def _lines(sums: Mapping[str, str]) -> str:
    """The lines of sha256sum."""
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items())


def _digest(sums: Mapping[str, str]) -> str:
    return hashlib.sha256(_lines(sums).encode()).hexdigest()


def environment_of(checkout: Path, image: Image) -> dict[str, str]:
    """The environment of processes in the image."""
    lines = (checkout / "containers" / "environment").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#")) | image.environment


def _assign(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _recipe(variant: Path, name: str, shared: Path) -> Path:
    """A variant's own definition or Containerfile, if its folder has one; else the shared one."""
    return variant / name if (variant / name).exists() else shared


def _docker(word: str, values: Mapping[str, str]) -> str:
    quoted = {key: json.dumps(value, ensure_ascii=False).replace("$", "\\$") for key, value in values.items()}
    return "".join(f"{word} {key}={value}\n" for key, value in quoted.items())
