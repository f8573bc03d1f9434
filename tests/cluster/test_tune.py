"""`dray tune` in an allocation of the real Slurm: its best is among the best of `--all`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from dray.runs import tuned
from grids import CAUSAL, MASKED, among_the_best

pytestmark = pytest.mark.cluster


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "nodes"), [(CAUSAL, 2), (MASKED, 1)], ids=["causal", "masked"])
def test_its_best_is_among_the_best_of_all(cluster, login, recipe: str, nodes: int) -> None:
    """Each run takes all nodes of the allocation, with two ranks on each."""
    most = 16 // (2 * nodes)
    home = cluster.shared / "home"
    (home / "tiny.toml").write_text(recipe)
    (home / "tiny.toml").chmod(0o644)
    tune = [
        *login.python, "tune", "/shared/home/tiny.toml", f"batch.per_device=1,{most}", "train.strategy=ddp,zero2",
        "--keys=per_device,strategy", "--steps=6", "--runs=/shared/home/tuned",
    ]  # fmt: skip
    both = " && ".join(shlex.join([*tune, *more, "--json"]) for more in ([], ["--all"]))
    code, out, err = cluster.exec(["salloc", "--quiet", f"--nodes={nodes}", "bash", "-c", both])
    assert code == 0, out + err
    by_search, by_grid = (json.loads(text) for text in re.split(r"(?<=^}\n)", out, flags=re.MULTILINE) if text)
    assert (by_grid["every"], len(by_grid["rows"]), by_grid["grid"]) == (True, 4, 4)
    assert {row["state"] for row in by_search["rows"] + by_grid["rows"]} == {"done"}, err
    assert among_the_best(by_search, by_grid)
    assert by_search["best"]["values"]["batch.per_device"] == most
    folder = cluster.shared / Path(by_search["study"]).relative_to("/shared")
    assert tuned.load(folder).complete
    assert not list(folder.glob("*/checkpoints/*"))
