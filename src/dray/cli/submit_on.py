"""`dray submit --on`: copy what the run needs to a remote, and submit it there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dray.cli.args import Chosen
from dray.cli.on import run
from dray.config import dray_home
from dray.config.load_toml import parse_toml
from dray.config.recipe import Recipe
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.images import store
from dray.remote import bring, names, parcel, ssh
from dray.remote.parcel import Parcel


def submit(name: str, asked: Chosen, argv: Sequence[str], *, site: str, follow: bool) -> int:
    """Run `dray submit` at the remote; return its exit code."""
    if follow:
        raise ConfigError("--follow does not go with --on", fix=f"after submitting: dray logs --on {name} -f")
    remote, recipe = names.find(name), asked.recipe()
    if recipe.adopted or recipe.layer:
        raise ConfigError(
            "adopted images and layers are not copied to a remote",
            found=f"adopted = {recipe.adopted!r}, layer = {recipe.layer!r}",
            fix="submit this recipe on the login node, or build an image that contains the packages",
        )
    # The digest that the recipe pins is checked here, before the file is sent.
    image = bring.require_sif(store.required(dray_home.root(), recipe.image_name, recipe.image_digest))
    file = Path(site) if site.endswith(".toml") else None
    sent = along(asked, recipe, file)
    typed = [*argv, *([f"--site=.site/{file.name}" if file else f"--site={site}"] if site else [])]
    typed += [f"./{asked.path.name}"] if asked.path else []
    typed += [*asked.overrides, *(["--", *asked.command] if asked.command else [])]
    with ssh.connected(remote) as connection:
        brought = bring.bring(connection, image, lambda line: print(line, file=sys.stderr), parcel.dray(), sent)
        return run(connection, ["submit", *typed], brought)


def along(asked: Chosen, recipe: Recipe, site: Path | None) -> Parcel:
    """The recipe's file, and the files that it names."""
    # As it is written: in what was read, a file of DeepSpeed's or accelerate's has its text in the place of its name.
    written = parse_toml(files.text(asked.path, "the recipe")) if asked.path else {}
    values = [*parcel.texts(written)]
    for key, _, value in (one.partition("=") for one in asked.overrides):
        values += parcel.texts(value.strip(), key.strip())
    folder = Path(os.path.normpath(recipe.command.folder)) if recipe.command else None
    if folder and not folder.is_relative_to(asked.beside):
        raise ConfigError(
            "the command's folder is outside the recipe's folder, which is all that dray copies to a remote",
            found=folder,
            fix="move it into the recipe's folder",
        )
    return parcel.recipe(asked.path, values, folder, asked.beside, site)
