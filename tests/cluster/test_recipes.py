"""Every recipe in its tiny form, whole: it trains, evaluates, and leaves a model that writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dray.planning.schema import Plan
from helpers import ROOT
from trainings import Forks, Run, in_image

SCALED = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml") if "[tiny]" in path.read_text())
SLOW = (
    "gpt2-micro-owt", "gpt2-wikitext-zero2-offload", "gpt2-wikitext-zero3", "gpt2-wikitext-zero3-offload",
    "opt-billions-zero3-offload",
)  # fmt: skip


def check(recipe: str, plan: Plan, events: Callable[[str], list[dict[str, Any]]], final: Path) -> None:
    """What a run of it leaves."""
    (start,) = events("start")
    assert (start["world_size"], plan.recipe.scale) == (2, "tiny")
    losses = [step["loss"] for step in events("step")]
    assert len(losses) > 3
    assert all(map(math.isfinite, losses))
    evaluations = events("eval")
    assert evaluations[-1]["perplexity"] == pytest.approx(math.exp(evaluations[-1]["loss"]))
    if plan.recipe.data.test:
        assert events("test")
    for name in plan.recipe.evaluate:
        assert len(events(f"eval-{name}")) == len(evaluations)
    assert (final / "model.safetensors").is_file()
    assert f"# {recipe}\n" in (final / "README.md").read_text()
    if plan.recipe.train.objective != "masked":
        assert events("end")[-1]["sample"]  # the saved model was loaded, and wrote


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Forks, Path]]:
    folder = tmp_path_factory.mktemp("recipes")
    forks = in_image(folder)
    yield forks, folder
    forks.close()


@pytest.mark.docker_image
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SCALED]
)
def test_a_recipe_is_walked_to_its_end(image, name: str) -> None:
    """Two ranks in the image, without a launcher."""
    forks, folder = image
    run = Run(forks, folder / name, 2, "scale=tiny", recipe=ROOT / "recipes" / f"{name}.toml").end()
    check(name, run.plan, run.events, run.paths.final_model)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(("name", "how"), [("gpt2-wikitext-zero2", "submit"), ("llama-sft", "sbatch")])
def test_a_recipe_is_a_job(sbatch, submit, name: str, how: str) -> None:
    """Both ways lead to the same plan; here with a rank on each node."""
    options = (f"recipes/{name}.toml", "scale=tiny", "ranks_per_node=1", "preflight.when=never")
    if how == "sbatch":
        ended = sbatch("slurm/multinode.sh", *options)
    else:
        ended, _ = submit(*options, "--nodes", "2", "--sbatch=--export=NONE")
    assert ended.code == 0, ended.output
    plan, result = Plan.model_validate_json((ended.attempt / "plan.json").read_text()), ended.result()
    assert (result["run"], result["status"], result["hosts"]) == (ended.folder.name, "done", ["n1", "n2"])
    assert plan.run == ended.folder.name
    assert result["sample"]
    runs = "/shared/runs" if how == "sbatch" else ended.folder.parent
    assert f"run folder: {runs}/{ended.folder.name}\n" in ended.output
    check(name, plan, ended.metrics, ended.folder / "checkpoints" / "final")
