"""The plan of a run whose nodes start a copy of the image on their own disks."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from dray.config.site import Site
from dray.facts import Facts
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs.prepare import read_recipe
from helpers import ROOT


def decided(
    disk: Path | str,
    image: Path,
    *,
    sha256: str,
    run: Path = Path("/runs/r"),
    scratch: str = "/tmp/dray-7-r",
    signers: tuple[str, ...] = (),
    **facts: object,
) -> Plan:
    said = {"scheduler": "slurm", "job": 7, "nodelist": "n[1-3]", "nodes": 3, "uid": 1000, "gid": 1000}
    said |= {"engine": "apptainer", "image": str(image), "image_sha256": sha256}
    site = Site.model_validate({"name": "s", "about": "", "stage": str(disk), "image_signers": signers})
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["batch.global_size=24"])
    seen = Facts.model_validate({**said, **facts})
    return plan(recipe, site, seen, run_folder=PurePosixPath(run), scratch=scratch, dray="0")
