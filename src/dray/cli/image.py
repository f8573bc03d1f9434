"""`dray image`: build, adopt, extend and inspect images."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from dray import process
from dray.cli import image_adopt, image_layer, image_lock, image_look
from dray.clients import builder
from dray.config import dray_home
from dray.config.image_definition import ACCELERATORS
from dray.contract.findings import ConfigError
from dray.fitness import build as needs
from dray.fitness.build import Build
from dray.images import build as make
from dray.images import inputs, store
from dray.images.build_output import build_log
from dray.images.rootfs import ROOTFS

app = typer.Typer(help="Build, adopt, extend, inspect and verify images.", no_args_is_help=True)

Variant = Annotated[str, typer.Argument(help=f"Image variant: {', '.join(ACCELERATORS)}.")]
Base = Annotated[
    str,
    typer.Option(
        envvar="DRAY_IMAGE_BASE",
        help="Base image: a reference, or a tar of a root filesystem. Default: the one in image.toml.",
    ),
]
Wheels = Annotated[
    Path | None, typer.Option(help="Folder with wheels and sources of your own, in addition to the fetched ones.")
]


class Debian(enum.StrEnum):
    """Which versions of Debian's packages a build takes."""

    LOCKED = "locked"
    CURRENT = "current"


Packages = Annotated[
    Debian,
    typer.Option(
        "--debian",
        envvar="DRAY_IMAGE_DEBIAN",
        help="locked: refuse packages that differ from the lock; current: take the newest of the package sources.",
    ),
]


class Format(enum.StrEnum):
    """The form of the built image."""

    SIF = "sif"
    DOCKER = "docker"
    PODMAN = "podman"


@app.command("build")
def build(
    variant: Variant,
    kind: Annotated[
        list[Format] | None,
        typer.Option(
            "--format", help="A SIF for Apptainer, or an image of Docker or Podman; may be repeated. Default: sif."
        ),
    ] = None,
    base: Base = "",
    wheels: Wheels = None,
    debian: Packages = Debian.LOCKED,
    bundled: Annotated[Path | None, typer.Option("--bundle", help="Build from a bundle, without network.")] = None,
    signers: Annotated[
        Path | None,
        typer.Option(help="File of accepted signers of the bundle: lines with a name and an ssh public key."),
    ] = None,
    twice: Annotated[bool, typer.Option(help="Build twice, and refuse images that differ.")] = False,
    force: Annotated[bool, typer.Option(help="Build even if an image of the same inputs exists.")] = False,
    out: Annotated[Path | None, typer.Option(help="SIF to write. Default: build/dray-VARIANT.sif.")] = None,
) -> None:
    """Build build/dray-VARIANT.sif, the Docker image dray:VARIANT, or both from the same files.

    dray image build cpu
    dray image build cuda --format docker
    """
    root, formats = dray_home.root(build=True), list(dict.fromkeys(kind or [Format.SIF]))
    if out and Format.SIF not in formats:
        raise ConfigError("--out is for --format sif", found=out, fix="docker save writes a Docker image to a file")
    if bundled and wheels:
        raise ConfigError("--wheels does not go with --bundle: a bundle has its own wheels", fix="leave out --wheels")
    if signers and not bundled:
        raise ConfigError("--signers needs --bundle", found=signers, fix="dray image verify checks who signed an image")
    asked = Build(checkout=root, variant=variant, formats=formats, out=out, wheels=wheels, bundled=bool(bundled))
    findings = needs.check(asked)
    print("\n".join(finding.line() for finding in findings), file=sys.stderr)
    if code := max(finding.code for finding in findings):
        raise typer.Exit(code)
    built = make.build(
        root,
        variant,
        formats=formats,
        base=base or None,
        out=out,
        wheels=wheels,
        bundled=bundled,
        signers=signers,
        as_locked=debian is Debian.LOCKED,
        twice=twice,
        force=force,
    )
    for image in built:
        print(image)


@app.command("bundle")
def bundle_(
    variant: Variant,
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: build/bundle-VARIANT.")] = None,
    base: Base = "",
    wheels: Wheels = None,
    debian: Packages = Debian.LOCKED,
    key: Annotated[Path | None, typer.Option(help="ssh private key that signs the bundle's checksums.")] = None,
) -> None:
    """Gather all files that a build reads in one folder, to build on a machine without network.

    dray image bundle cuda --out cuda-bundle
    """
    root = dray_home.root(build=True)
    folder = (out or root / "build" / f"bundle-{variant}").absolute()
    with build_log(root / "build" / "logs" / f"{variant}.log", out=folder) as say, builder.engine():
        source = inputs.gather(
            root, variant, base=base or None, own_wheels=wheels, as_locked=debian is Debian.LOCKED, say=say
        )
        made = inputs.to_bundle(root, source, folder, key=key, say=say)
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    print(f"{made}  {size / 1e6:.0f} MB\nto build from it: make image-{variant} BUNDLE={made.name}")


@app.command()
def enter(variant: Variant) -> None:
    """Open a shell in the root filesystem of a failed build; /mnt has the build's inputs.

    dray image enter cpu
    """
    root = dray_home.root(build=True)
    failed = store.failed(root, variant)
    if not (failed / ROOTFS).is_dir():
        raise ConfigError("there is no failed build of this image", where=failed, fix=f"dray image build {variant}")
    if not sys.stdin.isatty():
        raise ConfigError("a shell needs a terminal", where=failed)
    process.replace(builder.shell(failed / ROOTFS, (failed / "inputs").resolve()))


for verb in (
    image_adopt.adopt,
    image_layer.layer,
    image_lock.lock,
    image_look.inspect,
    image_look.verify,
    image_look.sign,
    image_look.sbom,
):
    app.command(verb.__name__)(verb)
