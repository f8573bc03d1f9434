"""`dray study tune` in an allocation of the real Slurm: its best is among the best of `--all`."""

from __future__ import annotations

import shlex

import pytest

from dray.runs import study
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
    argv = [
        *login.python, "study", "tune", "/shared/home/tiny.toml", f"batch.per_device=1,{most}",
        "train.strategy=ddp,zero2", "--steps=6",
    ]  # fmt: skip
    both = " && ".join(shlex.join([*argv, *more, f"--runs=/shared/home/tuned{len(more)}"]) for more in ([], ["--all"]))
    code, out, err = cluster.exec(["salloc", "--quiet", f"--nodes={nodes}", "bash", "-c", both])
    assert code == 0, out + err
    found = []
    for runs in ("tuned0", "tuned1"):
        folder = max((home / runs).glob("*-tune-*"))
        found.append(study.look(folder, study.load(folder)))
        assert {row.state for row in found[-1]} == {"done"}, err
        assert not list(folder.glob("*/checkpoints/*"))
    by_search, by_grid = found
    assert len(by_grid) == 4
    assert among_the_best(by_search, by_grid)
    best = study.best_row(by_search)
    assert best
    assert best.values["batch.per_device"] == most
