"""`dray submit --on`: what the run needs is brought there, and submitted there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dray.cli.chosen import Chosen
from dray.cli.on import run
from dray.config import checkout
from dray.config.model import parse_toml
from dray.config.recipe import Recipe
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.images import store
from dray.remote import bring, names, parcel, ssh
from dray.remote.parcel import Parcel


def submit(name: str, asked: Chosen, argv: Sequence[str], *, site: str, follow: bool) -> int:
    """The exit code of `dray submit` at the remote."""
    if follow:
        raise ConfigError("--follow is not for --on", fix=f"dray logs --on {name} -f, once it is in the queue")
    remote, recipe = names.find(name), asked.recipe()
    if recipe.adopted or recipe.layer:
        raise ConfigError(
            "an adopted image or a layer is not brought to a remote",
            found=f"adopted = {recipe.adopted!r}, layer = {recipe.layer!r}",
            fix="submit this recipe at the login node, or build an image with the packages in it",
        )
    # The digest that a recipe pins is that of this file, which is looked at before it is sent.
    image = bring.require_sif(store.required(checkout.root(), recipe.image_name, recipe.image_digest))
    file = Path(site) if site.endswith(".toml") else None
    sent = along(asked, recipe, file)
    typed = [*argv, *([f"--site=.site/{file.name}" if file else f"--site={site}"] if site else [])]
    typed += [f"./{asked.path.name}"] if asked.path else []
    typed += [*asked.overrides, *(["--", *asked.command] if asked.command else [])]
    with ssh.connected(remote) as connection:
        brought = bring.bring(connection, image, lambda line: print(line, file=sys.stderr), parcel.dray(), sent)
        return run(connection, ["submit", *typed], brought)


def along(asked: Chosen, recipe: Recipe, site: Path | None) -> Parcel:
    """The recipe's file, and the files that go along with it."""
    # As it is written: in what was read, a file of DeepSpeed's or accelerate's has its text in the place of its name.
    written = parse_toml(files.text(asked.path, "the recipe")) if asked.path else {}
    values = [*parcel.texts(written)]
    for key, _, value in (one.partition("=") for one in asked.overrides):
        values += parcel.texts(value.strip(), key.strip())
    folder = Path(os.path.normpath(recipe.command.folder)) if recipe.command else None
    if folder and not folder.is_relative_to(asked.beside):
        raise ConfigError(
            "the command's folder is not beside the recipe, and only that is brought to a remote",
            found=folder,
            fix="put it beside the recipe",
        )
    return parcel.recipe(asked.path, values, folder, asked.beside, site)
