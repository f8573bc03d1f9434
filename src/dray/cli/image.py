"""`dray image`: build, adopt, extend and inspect images."""

from __future__ import annotations

import enum
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dray.cli.args import Json
from dray.cli.streams import say
from dray.clients import builder
from dray.config import dray_home
from dray.config.image_definition import ACCELERATORS
from dray.contract import files
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError
from dray.fitness import build as needs
from dray.images import adopt as adopting
from dray.images import adopted_folder, inputs, store
from dray.images import build as make
from dray.images.build_output import build_log
from dray.images.fetch import base_image, debs
from dray.images.layers import make as layers
from dray.images.locks import conda, uv
from dray.images.locks import lock as locks
from dray.images.sif import format as sif_format
from dray.images.sif import inspect as summary
from dray.images.sif import record
from dray.images.sif import sign as signatures
from dray.images.sif import verify as identity

image_verbs = typer.Typer()

Variant = Annotated[str, typer.Argument(metavar="VARIANT", help=f"Image variant: {', '.join(ACCELERATORS)}.")]
Image = Annotated[str, typer.Argument(metavar="FILE|VARIANT", help="A SIF, or a variant that was built here.")]
Base = Annotated[
    str,
    typer.Option(
        envvar="DRAY_IMAGE_BASE",
        metavar="BASE",
        help="Base image: a reference, or a tar of a root filesystem. Default: the one in image.toml.",
    ),
]
Wheels = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder with wheels and sources of your own, in addition to the fetched ones."),
]
Debian = Annotated[
    Literal["locked", "current"],
    typer.Option(
        envvar="DRAY_IMAGE_DEBIAN",
        help="locked: refuse packages that differ from the lock; current: take the newest of the package sources.",
    ),
]


class Format(enum.StrEnum):
    """The form of a built image; typer takes no list of literals."""

    SIF = "sif"
    DOCKER = "docker"
    PODMAN = "podman"


_BY_NAME = re.compile(r"[A-Za-z0-9](?!.*://)[ -~]*")  # no option of pip's, no address


@image_verbs.command()
def build(
    variant: Variant,
    format: list[Format] | None = None,
    base: Base = "",
    wheels: Wheels = None,
    debian: Debian = "locked",
    bundle: Path | None = None,
    signers: Path | None = None,
    twice: bool = False,
    force: bool = False,
    out: Path | None = None,
) -> None:
    """Build build/dray-VARIANT.sif, the Docker image dray:VARIANT, or both from the same files.

    --format: A SIF for Apptainer, or an image of Docker or Podman; may be repeated. Default: sif.
    --bundle FOLDER: Build from a bundle, without network.
    --signers FILE: Accepted signers of the bundle: lines with a name and an ssh public key.
    --twice: Build twice, and refuse images that differ.
    --force: Build even if an image of the same inputs exists.
    --out FILE: SIF to write. Default: build/dray-VARIANT.sif.

    dray image build cpu
    dray image build cuda --format docker
    """
    root = dray_home.root(build=True)
    kinds = list(dict.fromkeys(format or [Format.SIF]))
    if signers and not bundle:
        raise ConfigError("--signers needs --bundle", fix="dray image verify checks who signed an image")
    if out and Format.SIF not in kinds:
        raise ConfigError("--out is for --format sif", fix="docker save writes a Docker image to a file")
    if bundle and wheels:
        raise ConfigError("--wheels does not go with --bundle, which has its own wheels", fix="leave out --wheels")
    asked = needs.Build(checkout=root, variant=variant, formats=kinds, out=out, bundled=bool(bundle))
    findings = needs.check(asked)
    for finding in findings:
        print(finding.line(), file=sys.stderr)
    if code := max(finding.code for finding in findings):
        raise typer.Exit(code)
    built = make.build(
        root, variant, formats=kinds, base=base or None, out=out, wheels=wheels, bundled=bundle, signers=signers,
        as_locked=debian == "locked", twice=twice, force=force,
    )  # fmt: skip
    print("\n".join(built))


@image_verbs.command()
def bundle(
    variant: Variant,
    out: Path | None = None,
    base: Base = "",
    wheels: Wheels = None,
    debian: Debian = "locked",
    key: Path | None = None,
) -> None:
    """Gather all files that a build reads in one folder, to build on a machine without network.

    --out FOLDER: Folder to write. Default: build/bundle-VARIANT.
    --key FILE: ssh private key that signs the bundle's checksums.

    dray image bundle cuda --out cuda-bundle
    """
    root = dray_home.root(build=True)
    folder = (out or root / f"build/bundle-{variant}").absolute()
    is_locked = debian == "locked"
    with build_log(root / f"build/logs/{variant}.log", out=folder) as tell, builder.engine():
        source = inputs.gather(root, variant, base=base or None, own_wheels=wheels, as_locked=is_locked, say=tell)
        made = inputs.to_bundle(root, source, folder, key=key, say=tell)
    print(f"{made}\nto build from it: make image-{variant} BUNDLE={made.name}")


@image_verbs.command()
def adopt(
    source: str,
    name: str = "",
    force: bool = False,
) -> None:
    """Start somebody else's image once and record what is in it, so that jobs can use it where it is.

    SOURCE: A SIF, docker://..., oras://..., oci:FOLDER, oci-archive:FILE or docker-archive:FILE.
    --name NAME: Name for recipes. Default: the source's own.
    --force: Replace an adopted image with the same name.

    dray image adopt theirs.sif --name theirs
    """
    root = dray_home.root(build=True)
    made = adopting.adopt(root, source, name=name, force=force, say=say)
    print(made.file)
    print(_aligned({"digest": made.digest, **made.versions}))
    if made.brought:
        print(f"dray adds, since the image lacks them: {', '.join(made.brought)}")
    for lack in made.lacks:
        print(f"dray: note: dray's own trainer needs {lack}", file=sys.stderr)
    print(f'in a recipe:\nimage = "{made.variant}"\nadopted = "{made.file.parent.name.removeprefix("dray-")}"')


@image_verbs.command()
def layer(
    variant: Variant,
    pip: list[str] | None = None,
    requirements: Path | None = None,
    lock: Path | None = None,
    name: str = "",
    wheels: Wheels = None,
    upgrade: bool = False,
) -> None:
    """Add packages to an image without building it again, in a small SIF beside it.

    --pip PACKAGE: Package as pip names it, such as 'trl>=1.0'; may be repeated.
    --requirements FILE: A requirements.txt with the packages.
    --lock FILE: Lock file of an earlier layer: take the same files again, without resolving.
    --name NAME: Name for recipes. Default: the names of its packages.
    --upgrade: Take the newest fitting versions.

    dray image layer cuda --pip trl --pip wandb --name mine
    """
    asked = list(pip or [])
    if requirements:
        for line in files.text(requirements, "the requirements").splitlines():
            if package := re.split("(?:^| )#", line)[0].strip():
                asked.append(package)
    if bool(asked) == bool(lock):
        raise ConfigError(
            "a layer has packages or a lock",
            wanted="--pip or --requirements, or --lock alone",
            fix=f"dray image layer {variant} --pip trl",
        )
    for package in asked:
        if not _BY_NAME.fullmatch(package):
            raise ConfigError(
                "a layer takes packages by name only, since it is locked by hashes",
                wanted="a line such as trl or trl==1.0",
                found=ascii(package),
                fix="build a wheel of the package, and give the wheel's folder: --wheels FOLDER",
            )
    if wheels and not wheels.is_dir():
        raise ConfigError("the folder of wheels does not exist", where=wheels)
    path, made = layers.make(
        dray_home.root(build=True), variant, asked, name=name, locked=lock,
        own_wheels=wheels and wheels.absolute(), upgrade=upgrade,
    )  # fmt: skip
    for package, version in made.packages.items():
        print(f"  {package} {version}")
    print(f"{path}  sha256:{made.sif.sha256}")
    print(f'in a recipe: image = "{variant}", layer = "{path.stem.removeprefix(f"dray-{variant}-")}"')


@image_verbs.command()
def lock(
    variant: str = "",
    check: bool = False,
    upgrade: bool = False,
    base: Base = "",
) -> None:
    """Resolve requirements.in to requirements.lock, debian.in to debian-*.lock, or .venv's packages to venv.lock.

    For a variant it also writes environment.yml, the same lock as a conda file. --base is for debian.

    VARIANT: What to lock: a variant such as cpu, debian or venv. Default: all but debian.
    --check: Write nothing; check that a lock is fresh and fits both architectures.
    --upgrade: Take the newest fitting versions.

    dray image lock cuda --check
    """
    root = dray_home.root(build=True)
    if variant == "debian":
        with build_log(root / "build/logs/debian.log") as tell:
            named = base or base_image.default(root, inputs.image(root, "cpu").base, say=tell)
            changes = debs.update_locks(root, base=base_image.fetched(root, named, say=tell), say=tell, check=check)
        if check and changes:
            raise ConfigError(
                "Debian's packages are not as locked",
                where=root / "containers",
                found="\n".join(changes),
                fix="dray image lock debian",
            )
        _show_changes("debian", changes)
        return
    # venv last: it keeps to the versions of the cpu image.
    for name in [variant] if variant else [*needs.variants(root), "venv"]:
        image = None if name == "venv" else inputs.image(root, name)
        if check:
            locks.require_fresh(root, image)
            lines = ["the lock is fresh", *uv.coverage(root, image)]
        else:
            lines = uv.update(root, image, upgrade=upgrade)
        if image:
            lines += conda.update(root, image, check=check)
        _show_changes(name, lines)


def _show_changes(name: str, changes: list[str]) -> None:
    for change in changes or ["nothing has changed"]:
        print(f"{name}: {change}")


@image_verbs.command()
def inspect(image: Image, as_json: Json = False) -> None:
    """Show an image's digest, base and versions, without starting it.

    dray image inspect cpu --json
    """
    file = _file(image)
    adopted = record.read(file) if store.described(file) else None
    if adopted:  # dray does not read the image itself
        found = adopted.model_dump(mode="json")
        lines = {
            "image": f"{file}, adopted from {adopted.base}",
            "digest": f"sha256:{adopted.sif.sha256}",
            "variant": adopted.variant,
            "dray": f"{adopted.dray}, beside it",
            **adopted.tools,
        }
    else:
        found = printable(summary.report(sif_format.read(file)))
        lines = {
            "image": f"{found['file']} ({found['size'] / 1e6:.0f} MB)",
            "digest": found["digest"],
            "signed": ", ".join(found["signed"]) or "no",
            "variant": f"{found['variant']}, {found['architecture']}",
            "base": found["base"],
            "python": found["python"],
            "dray": found["dray"],
            **found["versions"],
        }
    print(json.dumps(found, indent=1) if as_json else _aligned(lines))


@image_verbs.command()
def verify(
    image: Image,
    digest: str | None = None,
    key: list[str] | None = None,
    no_signature: bool = False,
) -> None:
    """Check an image's digest, and that a key of Apptainer's keyring, or of --key, has signed it.

    --digest DIGEST: Digest that the image must have, sha256:...
    --key FINGERPRINT: Fingerprint of an accepted key; may be repeated. Default: all keys of the keyring.
    --no-signature: Check the digest only.

    dray image verify cuda --digest sha256:...
    """
    sif = sif_format.read(_file(image))
    expected, source = identity.expected(sif.path, digest)
    print(f"{sif.path}\n{identity.require(sif.path, expected, source)} ({source})")
    if no_signature and not key:
        print("signature unchecked")
    else:
        print(f"signed by {', '.join(signatures.check(sif, key or ()))}")


@image_verbs.command()
def sign(
    image: Image,
    keyidx: int | None = None,
) -> None:
    """Sign an image with a key of Apptainer's keyring. The file gets a new digest, which dray records.

    --keyidx NUMBER: Number of the key in Apptainer's list. Needed if you have several keys.

    dray image sign cuda
    """
    file = _file(image)
    if (file.parent / adopted_folder.DESCRIBED).is_file():
        raise ConfigError(
            "an adopted image cannot be signed here: it stays as its owner made it",
            where=file.resolve(),
            fix="ask its owner to sign it (apptainer sign); then dray image adopt FILE --force",
        )
    sif = sif_format.read(file)
    digest, fingerprint = signatures.sign(sif, keyidx)
    print(f"{sif.path}\n{digest}\nsigned with {fingerprint}")


def _file(image: str) -> Path:
    return store.named(dray_home.root(), image)


def _aligned(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())
