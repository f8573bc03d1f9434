"""The plan of a run whose nodes start a copy of the image on their own disks."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from dray.config.site import Site
from dray.facts import Facts
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs.write import read_recipe
from helpers import ROOT


def decided(
    disk: Path,
    image: Path,
    *,
    by: str = "auto",
    nodes: int = 3,
    sha256: str,
    signers: tuple[str, ...] = (),
    **facts: object,
) -> Plan:
    said = {"scheduler": "slurm", "job": 7, "nodelist": f"n[1-{nodes}]", "nodes": nodes, "uid": 1000, "gid": 1000}
    said |= {"engine": "apptainer", "image": str(image), "image_sha256": sha256}
    known = {"name": "s", "about": "", "stage": str(disk), "stage_by": by, "image_signers": signers}
    site = Site.model_validate(known)
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", [f"batch.global_size={8 * nodes}"])
    seen = Facts.model_validate({**said, **facts})
    return plan(recipe, site, seen, run_folder=PurePosixPath("/runs/r"), scratch="/tmp/dray-7-r", dray="0")
