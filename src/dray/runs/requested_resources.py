"""Facts for a job before it is submitted, assuming that Slurm gives what is requested."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dray.config import dray_home, sites
from dray.config.recipe import Recipe
from dray.facts import Facts
from dray.fitness import network_and_site
from dray.images import store
from dray.planning import image
from dray.runs import local, prepare, slurm

ASSUMED = "assumed, because no node was probed: node names, GPUs, HF_HOME, job number 0, the site's engine or Apptainer"


class Known(NamedTuple):
    """Facts that all runs of a study share, asked once."""

    conf: Mapping[str, str]
    """Slurm's configuration, from scontrol."""
    choice: sites.Choice


def known(site: str) -> Known:
    """The facts of this login node."""
    return Known(slurm.conf(), network_and_site.site(site))


def facts(
    recipe: Recipe,
    nodes: int | None,
    gpus: int,
    site: str,
    *,
    ranks: int | None,
    options: Sequence[str],
    gpu_memory: float | None,
    known: Known | None = None,
) -> tuple[Facts, sites.Choice]:
    """The facts that this login node can know, and the site."""
    conf = known.conf if known else slurm.conf()
    file = os.environ.get("DRAY_IMAGE", "")
    here = local.facts(recipe, engine="apptainer", image=file or "none", nodes=nodes, gpus_per_node=gpus, site=site)
    told = {
        "scheduler": "slurm",
        "address": None,
        "home": "",
        "image_given": bool(file),
        "image_variant": store.variant(Path(file)) if file else "",
        "cluster": slurm.cluster_name(conf),
        "login": socket.gethostname(),
        "options": tuple(options),
        "gpu_memory_gb": gpu_memory,
    }
    seen, choice = prepare.at_site(here.model_copy(update=told), known.choice if known else None)
    variant = image.variant(recipe, choice.site, seen).value
    engine, name = choice.site.engine or "apptainer", recipe.adopted or variant
    job_image = store.job_file(dray_home.root(), name, engine)
    store.require_adopted(dray_home.root(), name, job_image)
    sbatch = (*choice.site.sbatch, *options)
    partition = _option(sbatch, "--partition=|-p") or os.environ.get("SBATCH_PARTITION", "")
    found = {
        "image": str(job_image),
        "image_variant": store.variant(job_image),
        **store.described(job_image),
        "gpus_per_node": gpus or (0 if variant == "cpu" else ranks or choice.site.gpus_per_node),
        "engine": engine,
        "account": _option(sbatch, "--account=|-A") or os.environ.get("SBATCH_ACCOUNT", ""),
        **slurm.preemption(conf, partition.replace(",", " ").split()),
    }
    return seen.model_copy(update=found), choice


def _option(options: Sequence[str], names: str) -> str:
    """The last value of an option of sbatch, by its long and its short name; empty without one."""
    values = [found[1] for option in options if (found := re.fullmatch(f"(?:{names})(.+)", option))]
    return values[-1] if values else ""
