"""Every recipe in its tiny form, whole on the real cluster: it trains, evaluates, and leaves a model that writes."""

from __future__ import annotations

import json
import math

import pytest

from helpers import ROOT

pytestmark = pytest.mark.cluster

SCALED = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml") if "[tiny]" in path.read_text())


@pytest.mark.parametrize(("name", "way"), [(name, ("submit", "sbatch")[at % 2]) for at, name in enumerate(SCALED)])
def test_a_recipe_is_walked_to_its_end(sbatch, submit, name: str, way: str) -> None:
    """Each in one of the two ways that lead to the same plan, with a rank on each node."""
    words = (f"recipes/{name}.toml", "scale=tiny", "ranks_per_node=1", "preflight.when=never")
    if way == "sbatch":
        ended = sbatch("slurm/multinode.sh", *words)
    else:
        ended, _ = submit(*words, "--nodes", "2", "--sbatch=--export=NONE")
    assert ended.code == 0, ended.output
    plan, result = (json.loads((ended.attempt / name).read_text()) for name in ("plan.json", "result.json"))
    assert (result["run"], result["status"], result["hosts"]) == (ended.folder.name, "done", ["n1", "n2"])
    assert plan["run"] == ended.folder.name
    assert (
        f"run folder: {'/shared/runs' if way == 'sbatch' else ended.folder.parent}/{ended.folder.name}\n"
        in ended.output
    )
    (start,) = ended.metrics("start")
    assert (start["world_size"], plan["recipe"]["scale"]) == (2, "tiny")
    losses = [step["loss"] for step in ended.metrics("step")]
    assert len(losses) > 3
    assert all(map(math.isfinite, losses))
    evaluations = ended.metrics("eval")
    assert evaluations[-1]["perplexity"] == pytest.approx(math.exp(evaluations[-1]["loss"]))
    if plan["recipe"]["data"]["test"]:
        assert ended.metrics("test")
    assert (ended.folder / "checkpoints" / "final" / "model.safetensors").is_file()
    assert f"# {name}\n" in (ended.folder / "checkpoints" / "final" / "README.md").read_text()
    for one in plan["recipe"]["evaluate"]:
        assert len(ended.metrics(f"eval-{one}")) == len(evaluations)
    if plan["recipe"]["train"]["objective"] != "masked":
        assert ended.result()["sample"]  # the saved model was loaded, and wrote
