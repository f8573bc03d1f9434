"""`dray image`: build the image that everything else runs in, and look into it."""

from __future__ import annotations

import enum
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import image_adopt, image_convert, image_layer, image_lock, image_look
from dray.config import checkout
from dray.config.image import ACCELERATORS
from dray.containers import builder
from dray.contract.findings import ConfigError
from dray.fitness import build as needs
from dray.fitness.machine import Build
from dray.images import build as make
from dray.images import store
from dray.images.log import build_log
from dray.images.rootfs import ROOTFS
from dray.images.sources import bundle, inputs

app = typer.Typer(help="Build the image that a run starts from, and look into it.", no_args_is_help=True)

Variant = Annotated[str, typer.Argument(help=f"A folder of containers/: {', '.join(ACCELERATORS)}.")]
Base = Annotated[
    str,
    typer.Option(
        envvar="DRAY_IMAGE_BASE",
        help="An image reference, or the tar of a root filesystem; else that of image.toml.",
    ),
]
Wheels = Annotated[
    Path | None, typer.Option(help="A folder of wheels and sources of your own, besides what is fetched.")
]


class Debian(enum.StrEnum):
    """Which of Debian's packages are taken."""

    LOCKED = "locked"
    CURRENT = "current"


Packages = Annotated[
    Debian,
    typer.Option(
        "--debian",
        envvar="DRAY_IMAGE_DEBIAN",
        help="locked: refuse packages that are not as locked; current: take what the sources have.",
    ),
]


class Format(enum.StrEnum):
    """What comes out."""

    SIF = "sif"
    DOCKER = "docker"
    PODMAN = "podman"


@app.command("build")
def build(
    variant: Variant,
    kind: Annotated[
        list[Format] | None,
        typer.Option("--format", help="A SIF for Apptainer, or an image in Docker or Podman; may be repeated."),
    ] = None,
    base: Base = "",
    wheels: Wheels = None,
    debian: Packages = Debian.LOCKED,
    bundled: Annotated[Path | None, typer.Option("--bundle", help="Build from a bundle, without a network.")] = None,
    signers: Annotated[
        Path | None, typer.Option(help="Who may have signed the bundle: lines of a name and an ssh public key.")
    ] = None,
    twice: Annotated[bool, typer.Option(help="Build two times, and refuse two that differ.")] = False,
    from_nothing: Annotated[
        bool, typer.Option("--from-nothing", help="Compile DeepSpeed's operators too, and use none that were kept.")
    ] = False,
    force: Annotated[bool, typer.Option(help="Build also what is there already, of the same inputs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the SIF goes; else build/dray-VARIANT.sif.")] = None,
) -> None:
    """Build build/dray-VARIANT.sif, or the Docker image dray:VARIANT, or both from the same files.

    dray image build cpu
    dray image build cuda --format docker
    """
    root, formats = checkout.root(build=True), list(dict.fromkeys(kind or [Format.SIF]))
    if out and Format.SIF not in formats:
        raise ConfigError("--out is for --format sif", found=out, fix="docker save writes a Docker image to a file")
    if bundled and wheels:
        raise ConfigError("a bundle has wheels of its own", found=f"--bundle {bundled} --wheels {wheels}")
    if signers and not bundled:
        raise ConfigError(
            "--signers is for --bundle", found=signers, fix="dray image verify checks who signed an image"
        )
    if not os.environ.get("DRAY_CHECKED"):  # by make, before it installed anything
        wanted = Build(checkout=root, variant=variant, formats=formats, out=out, wheels=wheels, bundled=bool(bundled))
        if code := needs.show(needs.check(wanted), lambda line: print(line, file=sys.stderr)):
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
        from_nothing=from_nothing,
        force=force,
    )
    for image in built:
        print(image)


@app.command("bundle")
def bundle_(
    variant: Variant,
    out: Annotated[Path | None, typer.Option(help="The folder; else build/bundle-VARIANT.")] = None,
    base: Base = "",
    wheels: Wheels = None,
    debian: Packages = Debian.LOCKED,
    key: Annotated[Path | None, typer.Option(help="An ssh private key, to sign the bundle's checksums with.")] = None,
) -> None:
    """Gather all that a build reads in one folder, for a machine without a network.

    dray image bundle cuda --out cuda-bundle
    """
    root = checkout.root(build=True)
    folder = (out or root / "build" / f"bundle-{variant}").absolute()
    with build_log(root / "build" / "logs" / f"{variant}.log", out=folder) as say:
        source = inputs.gather(
            root, variant, base=base or None, own_wheels=wheels, as_locked=debian is Debian.LOCKED, say=say
        )
        made = bundle.make(root, source, folder, key=key, say=say)
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    print(f"{made}  {size / 1e6:.0f} MB\nto build from it: make image-{variant} BUNDLE={made.name}")


@app.command()
def enter(variant: Variant) -> None:
    """Open a shell in what a failed build has left, with the build's inputs in /mnt.

    dray image enter cpu
    """
    root = checkout.root(build=True)
    failed = store.failed(root, variant)
    if not (failed / ROOTFS).is_dir():
        raise ConfigError("no build of this image has failed", where=failed, fix=f"dray image build {variant}")
    if not sys.stdin.isatty():
        raise ConfigError("a shell needs a terminal", where=failed)
    argv = builder.shell(failed / ROOTFS, binds={(failed / "inputs").resolve(): "/mnt"})
    os.execv(argv[0], argv)  # noqa: S606  the shell takes this program's place, terminal and all


for verb in (
    image_adopt.adopt,
    image_convert.convert,
    image_layer.layer,
    image_lock.lock,
    image_look.inspect,
    image_look.verify,
    image_look.sign,
    image_look.sbom,
    image_look.diff,
):
    app.command(verb.__name__)(verb)
