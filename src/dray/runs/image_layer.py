"""The layer that a recipe names: its file, its record, and whether it fits the image."""

from __future__ import annotations

import json
import re
import shlex
import stat
import sys
from pathlib import Path

from dray import engines
from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.facts import Facts, Layer
from dray.images import store
from dray.images.layers import layer_lock
from dray.images.locks import lock
from dray.images.sif import record, verify
from dray.planning import image

_NOBODY = 65534


def ask(recipe: Recipe, site: Site, facts: Facts) -> list[str]:
    """The line that asks slurm/plan.sh to bind the layer into the planner's container; empty if that is done.

    A layer is one variant's, and only an adopted image itself tells its variant.
    """
    if facts.layer or not (facts.image_given or image.is_adopted(recipe, facts)):
        return []
    file = _file(recipe, site, facts.model_copy(update={"engine": site.engine or facts.engine}))
    return [f"layer={file}"] if file else []


def look(recipe: Recipe, site: Site, facts: Facts) -> Layer | None:
    """The layer, from its record; None if the recipe names none or the engine cannot bind one."""
    file = _file(recipe, site, facts)
    if not file:
        return None
    variant = image.variant(recipe, site, facts).value
    fix = f"dray image layer {variant} --pip PACKAGE --name {recipe.layer}"
    if not file.is_file():
        raise ConfigError("the layer does not exist", wanted=file, fix=fix)
    if not (files.is_own(file) or _is_hidden(file)):
        owner, build = file.stat(), dray_home.root() / "build"
        raise ConfigError(
            "another user may change the layer, and every rank runs its code",
            where=file,
            wanted="a file of yours or of root's, which not everybody may write",
            found=f"a file of user {owner.st_uid}, mode {owner.st_mode & 0o7777:04o}",
            fix=f"cp {shlex.quote(str(file))}{{,.json}} {shlex.quote(str(build))}/, and name that copy",
        )
    layer, needs = _recorded(file)
    if layer is None or verify.digest(file) != layer.digest:
        raise ConfigError(
            "the layer differs from its record, or has none",
            where=file,
            wanted=f"the digest in {record.path_for(file)}",
            fix=f"copy the layer again with its record, or {fix}",
        )
    return layer.model_copy(update={"changed": tuple(layer_lock.unfit(needs, _packages(variant)))})


def made(variant: str, name: str) -> Layer | None:
    """The layer with this name; None if `dray image layer` did not make it here."""
    return _recorded(store.layer(dray_home.root(), variant, name).absolute())[0]


def _recorded(file: Path) -> tuple[Layer | None, dict[str, str]]:
    """The layer as its record tells it, and the packages that it was locked for."""
    known = record.read(file) if file.is_file() else None
    if known is None or not known.python:  # an image's own record names no Python
        return None, {}
    digest = f"sha256:{known.sif.sha256}"
    return Layer(file=str(file), digest=digest, variant=known.variant, packages=known.packages), known.needs


def _is_hidden(file: Path) -> bool:
    """Whether this container shows all other users as nobody; the job's script checked the owner outside."""
    found, users = file.stat(), Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    return found.st_uid == _NOBODY and users[2:] == ["1"] and not found.st_mode & stat.S_IWOTH


def _file(recipe: Recipe, site: Site, facts: Facts) -> Path | None:
    if recipe.layer is None or not engines.get(facts.engine).binds_layers:
        return None
    return store.layer(dray_home.root(), image.variant(recipe, site, facts).value, recipe.layer)


def _packages(variant: str) -> dict[str, str]:
    """The image's packages, from the image around this program, or from the checkout's lock."""
    try:
        found = json.loads((Path(sys.prefix) / "image.json").read_text(encoding="utf-8"))["packages"]
        return {re.sub(r"[-_.]+", "-", name).lower(): str(version) for name, version in found.items()}
    except (OSError, ValueError, KeyError):
        pins = lock.read(dray_home.root() / f"containers/{variant}/requirements.lock")
        return {pin.name: pin.version for pin in pins}
