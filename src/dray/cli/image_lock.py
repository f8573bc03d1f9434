"""`dray image lock`: pin every file of an image by its hash."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.config import dray_home
from dray.contract.findings import ConfigError
from dray.images import inputs
from dray.images.build_output import build_log
from dray.images.fetch import base_image as bases
from dray.images.fetch import debs
from dray.images.locks import conda, uv
from dray.images.locks import lock as locks


def lock(
    variant: Annotated[
        str | None,
        typer.Argument(help="What to lock: a variant such as cpu, debian or venv. Default: all but debian."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; check that a lock is fresh and fits both architectures.")
    ] = False,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Take the newest fitting versions.")] = False,
    base: Annotated[
        str, typer.Option(envvar="DRAY_IMAGE_BASE", help="With debian: base image whose package sources are asked.")
    ] = "",
) -> None:
    """Resolve requirements.in to requirements.lock, debian.in to debian-*.lock, or .venv's packages to venv.lock.

    For a variant it also writes environment.yml, the same lock as a conda file.

    dray image lock cuda --check
    """
    root = dray_home.root(build=True)
    if variant == "debian":
        _debian(root, base, check=check)
        return
    # venv last: it keeps to the versions of the cpu image.
    variants = sorted(path.parent.name for path in root.glob("containers/*/image.toml"))
    for name in [variant] if variant else [*variants, "venv"]:
        image = None if name == "venv" else inputs.image(root, name)
        if check:
            locks.require_fresh(root, image)
            lines = ["the lock is fresh", *uv.coverage(root, image)]
        else:
            lines = uv.update(root, image, upgrade=upgrade)
        if image:
            lines += conda.update(root, image, check=check)
        print("\n".join(f"{name}: {line}" for line in lines or ["nothing has changed"]))


def _debian(root: Path, named: str, *, check: bool) -> None:
    with build_log(root / "build" / "logs" / "debian.log") as say:
        base = named or bases.default(root, inputs.image(root, "cpu").base, say=say)
        file = bases.fetched(root, base, say=say)
        changes = debs.update_locks(root, base=file, say=say, check=check)
        if check and changes:
            raise ConfigError(
                "Debian's packages are not as locked",
                where=root / "containers",
                found="\n".join(changes),
                fix="dray image lock debian",
            )
        print("\n".join(f"debian: {change}" for change in changes or ["nothing has changed"]))
