"""The user's layer: what it adds, and why a run with it must not start."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from dray.config.recipe import Recipe
from dray.contract import exit_codes
from dray.contract.findings import Finding, counted
from dray.engines.base import Engine
from dray.facts import Files, Layer


def reason(layer: Layer) -> str:
    """The layer's packages and digest, in one line."""
    names = ", ".join(list(layer.packages)[:3]) + (", ..." if len(layer.packages) > 3 else "")
    return f"{counted(len(layer.packages), 'package')} after the image's own ({names}), {layer.digest[:19]}"


def refusals(recipe: Recipe, engine: Engine, files: Files) -> Iterator[Finding]:
    """Refuse an engine without layers, a layer for another image or digest, an image with other packages."""
    layer = files.layer
    if recipe.layer and not engine.binds_layers:
        yield _refusal(
            f"{engine.name} cannot bind a layer",
            wanted="apptainer or singularity, since the recipe has a layer",
            found=f"layer = {recipe.layer}",
            fix="leave it out (layer=), or start a SIF; in a Python of your own, pip install its packages",
        )
    if layer is None:
        return
    if layer.variant != recipe.image:
        yield _refusal(
            "the layer is for another image",
            where=layer.file,
            wanted=f"a layer for {recipe.image}",
            found=f"a layer for {layer.variant}",
            fix=f"dray image layer {recipe.image} --lock {shlex.quote(layer.file.removesuffix('.sif') + '.lock')}",
        )
    elif layer.changed:
        yield _refusal(
            "the layer was made for other packages than the image has",
            where=layer.file,
            wanted="the versions that it was locked for",
            found="\n".join(layer.changed),
            fix=f"make it again: dray image layer {recipe.image} --upgrade with the same --pip",
        )
    if recipe.layer_digest and layer.digest != recipe.layer_digest:
        yield _refusal(
            "the layer has another digest",
            where=layer.file,
            wanted=f"{recipe.layer_digest} (layer_digest of the recipe)",
            found=layer.digest,
            fix=f"make the same bytes again from its lock: dray image layer {recipe.image} --lock FILE",
        )


def _refusal(problem: str, *, wanted: str, found: str, fix: str, where: str = "") -> Finding:
    return Finding(problem, where=where, wanted=wanted, found=found, fix=fix, code=exit_codes.CONFIG)
