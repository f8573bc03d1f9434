"""What comes from the hub can be pinned to a commit, and the plan says what is not."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from dray import render
from dray.config.site import Site
from dray.contract.findings import ConfigError
from dray.facts import Facts, Files
from dray.planning.plan import plan
from dray.runs import prepare
from dray.runs.prepare import read_recipe

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FACTS = Facts(scheduler="local", nodelist="n1", nodes=1, engine="bare", image="python3")


def of(root: Path, *overrides: str) -> str | None:
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", overrides)
    made = plan(
        recipe, Site(name="s", about=""), FACTS, Files(), run_folder=PurePosixPath("/r"), scratch="/s", dray="0"
    )
    shown = [" ".join(line.split()) for line in render.text(made).splitlines() if line.startswith("  hub ")]
    assert shown == ([f"hub {made.reasons['hub']}"] if "hub" in made.reasons else [])
    return made.reasons.get("hub")


@pytest.mark.parametrize(
    ("overrides", "loose"),
    [
        (["data.train=hub:me/texts"], "data.train"),
        (["data.train=hub:me/texts@main/default:train"], "data.train"),
        (["data.train=hub:me/texts", f"data.test=hub:me/texts@{COMMIT}"], "data.train"),
        (["data.train=hf://datasets/me/texts/*.jsonl", f"data.test=hf://datasets/me/it@{COMMIT}/a.txt"], "data.train"),
        (["data.train=json:hf://datasets/me/texts@main/a.any"], "data.train"),
        (["model.name=gpt2"], "model.revision"),
        (["model.name=gpt2", f"model.revision={COMMIT}", "model.tokenizer=me/it"], "model.tokenizer_revision"),
        (["model.name=gpt2", f"model.revision={COMMIT[:12]}", "model.tokenizer=gpt2"], "model.revision"),
    ],
)
def test_what_is_not_pinned_is_told(root: Path, overrides: list[str], loose: str) -> None:
    assert of(root, *overrides) == f"not pinned to a commit: {loose}; `dray data prefetch` prints the commits"


@pytest.mark.parametrize(
    "overrides",
    [
        [f"data.train=hub:me/texts@{COMMIT}/default:train+test"],
        [f"data.train=hub:me/texts@{COMMIT}", "model.name=me/it", f"model.revision={COMMIT}"],
        ["model.tokenizer=me/it", f"model.tokenizer_revision={COMMIT}"],
    ],
)
def test_what_is_pinned(root: Path, overrides: list[str]) -> None:
    assert of(root, *overrides) == "all models and datasets are pinned to commits"


def test_a_recipe_that_reads_nothing_of_the_hub(root: Path, tmp_path: Path) -> None:
    assert of(root) is None
    assert of(root, f"model.name={tmp_path}") is None


@pytest.mark.parametrize(
    "name",
    [
        "hub:me/texts@",
        "hub:me@v1/texts",
        "hub:me/texts@a@b",
        "hub:me/texts/x@v1",
        "hub:me/texts@a b",
        "hub:@v1",
        "hub:me/@v1",
    ],
)
def test_names_that_are_none(root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected hub:OWNER/NAME"):
        read_recipe(root / "recipes" / "smoke-cpu.toml", [f"data.train={name}"])


def test_the_cache_has_a_dataset_whatever_its_revision(root: Path, tmp_path: Path) -> None:
    (tmp_path / "hub" / "datasets--me--texts").mkdir(parents=True)
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", [f"data.train=hub:me/texts@{COMMIT}/default"])
    assert prepare.find_inputs(recipe, FACTS.model_copy(update={"hf_home": str(tmp_path)})).missing_on_hub == ()
