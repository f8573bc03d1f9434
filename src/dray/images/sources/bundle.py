"""A bundle: one folder with all that a build reads, for a machine without a network."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from dray.clients import builder, docker
from dray.contract.findings import ConfigError
from dray.images.sources import arrival, inputs
from dray.images.sources.arrival import SUMS
from dray.images.sources.inputs import BUILDER, README, Source

_TAR, _SIF = "base.tar", "base.sif"
_README = """# The {variant} image of dray, to be built without a network

Made by `dray image bundle {variant}`. On a machine without a network, in a checkout of the same version of dray:

    make image-{variant} BUNDLE={out}            # SIGNERS=FILE if it is signed: docs/images.md

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


def make(checkout: Path, source: Source, out: Path, *, key: Path | None = None, say: Callable[[str], None]) -> Path:
    """Write the bundle `out` from the inputs of a build, signed if there is a key. A failure leaves nothing."""
    if out.exists():
        raise ConfigError("the bundle's folder exists already", where=out, fix="name another with --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as made:
        folder = Path(made) / out.name
        shutil.copytree(source.inputs, folder, copy_function=inputs.link)
        inputs.link(source.base, folder / (_SIF if source.base.suffix == ".sif" else _TAR))
        _tools(checkout, folder, say)
        (folder / README).write_text(_readme(folder, source.image.variant, out.name))
        (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in arrival.sums(folder).items()))
        if key:
            arrival.sign(folder, key)
        folder.replace(out)
    return out


def opened(checkout: Path, folder: Path, variant: str, *, signers: Path | None = None) -> Source:
    """The inputs in a bundle. Refuses one that is not complete, is for another image, or is not signed by `signers`."""
    folder = folder.expanduser().resolve()
    arrival.require(folder, checkout / "containers", signers)
    found = inputs.facts(folder)["DRAY_VARIANT"]
    if found != variant:
        raise ConfigError("the bundle is for another image", where=folder, wanted=variant, found=found)
    base = next(folder / name for name in (_TAR, _SIF) if (folder / name).exists())
    return Source(image=inputs.image(checkout, variant), inputs=folder, base=base)


def _readme(folder: Path, variant: str, name: str) -> str:
    tar = (folder / _TAR).exists()
    return _README.format(
        variant=variant,
        out=name,
        unpack=_UNPACK if tar else "",
        base="base" if tar else _SIF,
        docker=_DOCKER.format(variant=variant) if tar else "",
    )


def _tools(checkout: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Add the builder's image if Apptainer runs in Docker here: the other machine will need it too."""
    with builder.engine() as client:
        if client is not None:
            image = builder.image(client, checkout, say)
            with docker.attempt("write the builder to a file"), (folder / BUILDER).open("wb") as out:
                out.writelines(client.images.get(image).save(named=builder.TAG))
