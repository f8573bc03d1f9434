"""`dray tune` in an allocation of the real Slurm, in the image: its best is among the best of `--all`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from dray.runs import tuned
from grids import CAUSAL, among_the_best

pytestmark = pytest.mark.cluster


def test_its_best_is_among_the_best_of_all(cluster, sif: Path) -> None:
    """One node of the allocation: the ranks are this container's own, since the image has no srun."""
    home = cluster.shared / "home"
    (home / "tiny.toml").write_text(CAUSAL)
    (home / "tiny.toml").chmod(0o644)
    tune = [
        "python3", "-m", "dray", "tune", "/shared/home/tiny.toml", "batch.per_device=1,8", "train.strategy=ddp,zero2",
        "--keys=per_device,strategy", "--steps=6", "--local", "--runs=/shared/home/tuned",
    ]  # fmt: skip
    image = ["apptainer", "exec", "--bind", "/shared", "--pwd", "/shared/home", str(sif)]
    both = " && ".join(shlex.join([*image, *tune, *more, "--json"]) for more in ([], ["--all"]))
    step = ["srun", "--ntasks=1", "--nodes=1", "--cpu-bind=none", "bash", "-c", both]
    code, out, err = cluster.exec(["salloc", "--quiet", "--nodes=1", *step], workdir="/shared/home")
    assert code == 0, out + err
    by_search, by_grid = (json.loads(text) for text in re.split(r"(?<=^}\n)", out, flags=re.MULTILINE) if text)
    assert (by_grid["every"], len(by_grid["rows"]), by_grid["grid"]) == (True, 4, 4)
    assert {row["state"] for row in by_search["rows"] + by_grid["rows"]} == {"done"}, err
    assert among_the_best(by_search, by_grid)
    assert by_search["best"]["values"]["batch.per_device"] == 8
    folder = cluster.shared / Path(by_search["study"]).relative_to("/shared")
    assert tuned.load(folder).complete
    assert not list(folder.glob("*/checkpoints/*"))
