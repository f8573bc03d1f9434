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
from dray.fitness import host
from dray.images import store
from dray.planning import image
from dray.runs import local, slurm, write

ASSUMED = "assumed, because no node was probed: node names, GPUs, HF_HOME, job number 0, the site's engine or Apptainer"
_ACCOUNT = ("--account=", "-A")


class Known(NamedTuple):
    """Facts that all runs of a study share, asked once."""

    conf: Mapping[str, str]
    """Slurm's configuration, from scontrol."""
    choice: sites.Choice


def known(site: str) -> Known:
    """The facts of this login node."""
    return Known(slurm.conf(), host.site(site))


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
    count = nodes or recipe.nodes
    conf = slurm.conf() if known is None else known.conf
    given_image = os.environ.get("DRAY_IMAGE", "")
    seen = Facts(
        scheduler="slurm",
        nodelist=f"node[1-{count}]" if count > 1 else "node1",
        nodes=count,
        engine="apptainer",
        image=given_image,
        image_given=bool(given_image),
        image_variant=store.variant(Path(given_image)) if given_image else "",
        site=site,
        cluster=slurm.cluster_name(conf),
        login=socket.gethostname(),
        options=tuple(options),
        gpu_memory_gb=gpu_memory,
        hf_home=local.hf_home(),
        uid=os.getuid(),
        gid=os.getgid(),
        shell=dict(os.environ),
    )
    seen, choice = write.at_site(seen, known.choice if known else None)
    variant = image.variant(recipe, choice.site, seen).value
    engine = choice.site.engine or "apptainer"
    file = store.job_file(dray_home.root(), recipe.adopted or variant, engine)
    store.require_adopted(dray_home.root(), recipe.adopted or variant, file)
    given = [option for option in (*choice.site.sbatch, *options) if option.startswith(_ACCOUNT)]
    found = {
        "image": str(file),
        "image_variant": store.variant(file),
        **store.described(file),
        "gpus_per_node": gpus or (0 if variant == "cpu" else ranks or choice.site.gpus_per_node),
        "engine": engine,
        "account": given[-1] if given else os.environ.get("SBATCH_ACCOUNT", ""),
        **slurm.preemption(conf, _partitions((*choice.site.sbatch, *options))),
    }
    return seen.model_copy(update=found), choice


def _partitions(options: Sequence[str]) -> list[str]:
    """The partitions given to sbatch; none for the default partition."""
    given = [found[1] for option in options if (found := re.fullmatch(r"(?:--partition=|-p)(.+)", option))]
    return (given[-1] if given else os.environ.get("SBATCH_PARTITION", "")).replace(",", " ").split()
