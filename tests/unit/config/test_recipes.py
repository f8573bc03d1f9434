"""The recipes that come with dray: each whole and tiny, and what becomes of them on the clusters that they are for."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

from command import dray
from dray import render
from dray.config import recipe_packages, sites
from dray.config.load_toml import load
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.planning.plan import plan
from dray.planning.world import divide
from dray.runs import local
from dray.runs import submit as queue
from dray.runs.prepare import read_recipe
from helpers import ROOT, golden

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
IN_AN_IMAGE = {
    "bert-mlm-analog", "gpt2-micro-owt", "gpt2-wikitext-zero2-offload", "gpt2-wikitext-zero2",
    "gpt2-wikitext-zero3-offload", "gpt2-wikitext-zero3", "opt-billions-zero3-offload", "opt125m-yelp",
}  # fmt: skip
SCALED = [path for path in RECIPES if path.stem != "smoke-cpu"]  # which is tiny as it is


def same(name: str, text: str) -> None:
    text = re.sub(rf"'({re.escape(str(ROOT))}[^']*)'", r"\1", text).replace(str(ROOT), "/dray")
    text = re.sub(r"\d{8}-\d{6}-[a-z0-9-]+-[0-9a-f]{6}", "RUN", text).rstrip("\n") + "\n"
    golden(name, text)


@pytest.mark.parametrize("path", SCALED, ids=lambda path: path.stem)
def test_a_recipe_is_good_whole_and_tiny(path: Path) -> None:
    whole, tiny = read_recipe(path), read_recipe(path, ["scale=tiny"])
    assert (whole.name, tiny.name) == (path.stem, path.stem)
    assert whole.about
    assert (whole.scale, tiny.scale) == ("whole", "tiny")
    assert whole.train
    assert tiny.train
    # The same way is walked: what starts the ranks, how the model is on them, what is learnt.
    assert (whole.launcher, whole.train.strategy, whole.train.offload, whole.train.objective, whole.data.streaming) == (
        (tiny.launcher, tiny.train.strategy, tiny.train.offload, tiny.train.objective, tiny.data.streaming)
    )
    # It needs nothing but this checkout.
    assert (tiny.image, tiny.model.name, tiny.model.tokenizer) == ("cpu", "", "")
    for place in (tiny.data.train, tiny.data.validation, tiny.data.test):
        assert place in ("", "builtin") or Path(place).is_file(), place
    assert tiny.batch
    for ranks in (1, 2, 4):
        divide(tiny.batch, world_size=ranks)
    assert whole.batch
    for ranks in (8, 16):
        divide(whole.batch, world_size=ranks)


@pytest.mark.seconds
def test_the_list_names_each_with_a_line() -> None:
    ended = dray("recipe", "list")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [f"{path.stem:<30} {load(Recipe, path).about}" for path in RECIPES]
    lines += [
        f"{f'trl/{name}':<30} {load(Recipe, ROOT / f'recipes/trl/{name}.toml').about}" for name in ("dpo", "grpo")
    ]
    assert ended.stdout.splitlines() == lines
    assert max(map(len, ended.stdout.splitlines())) <= 120


def test_what_make_demo_installs() -> None:
    """All that recipes need which run outside an image."""
    needed = {one.module for path in RECIPES for one in recipe_packages.of(read_recipe(path)) if one.demo}
    assert needed == {"transformers", "accelerate", "peft"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert needed <= {re.split("[^a-z]", name)[0] for name in project["optional-dependencies"]["train"]}


@pytest.mark.torch
@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="it is refused where DeepSpeed is not installed")
def test_a_recipe_that_this_python_cannot_run_is_refused_before_its_launch(tmp_path: Path) -> None:
    words = ("gpt2-micro-owt", "scale=tiny", "--runs", tmp_path / "my runs")
    ended = dray("run", *words)
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        78,
        "",
        "dray: the recipe needs deepspeed, which this Python does not have\n"
        f"  where:  {sys.executable}\n"
        "  wanted: deepspeed, for train.strategy = zero2\n"
        "  fix:    dray image build cpu --format docker, then the same command with --engine docker\n",
    )
    assert not list(tmp_path.iterdir())


def test_the_page_lists_each_recipe_with_its_own_strategy_launcher_batch_and_length() -> None:
    table = (ROOT / "docs/reference/recipes.md").read_text(encoding="utf-8").split("\n\n")[2].splitlines()[2:]
    listed = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    expected = {}
    for path in RECIPES:
        recipe = read_recipe(path)
        steps, epochs = recipe.train.steps, recipe.train.epochs
        length = f"{steps:,} steps" if steps else f"{epochs:g} epoch{'s' * (epochs > 1)}"
        expected[path.stem] = [recipe.train.strategy, recipe.launcher, str(recipe.batch.global_size), length]
    assert {row[0]: [row[3].partition(",")[0], *row[4:]] for row in listed} == expected


def test_the_first_recipe_of_the_training_page_is_a_recipe(tmp_path: Path) -> None:
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    file = tmp_path / "gpt2-mine.toml"
    file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    assert read_recipe(file).name == "gpt2-mine"


def test_a_command_needs_its_launcher_alone(monkeypatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda _: None)
    local.require(read_recipe(None, ["launcher=python"], ["t.py"]))
    with pytest.raises(ConfigError, match="the recipe needs accelerate, which this Python does not have"):
        local.require(read_recipe(None, ["launcher=accelerate"], ["t.py"]))
    with pytest.raises(ConfigError) as refused:
        local.require(read_recipe(ROOT / "recipes" / "smoke-cpu.toml"))
    assert refused.value.details["fix"] == (
        "dray image build cpu --format docker, then the same command with --engine docker"
    )


SEEDS = {
    "generic": ("bert-mlm-analog", "--gpus-per-node=8"),
    "taiwania2": ("gpt2-wikitext-ddp", "image=cuda12", "train.precision=fp16"),
    "iris": ("opt125m-yelp", "image=cuda12", "train.precision=fp16"),
    "meluxina": ("opt125m-yelp",),
    "lumi-1": ("gpt-neo-imdb", "image=rocm6"),
    "lumi-2": ("gpt-neo-imdb", "image=rocm6"),
}


@pytest.mark.seconds
@pytest.mark.parametrize("where", SEEDS)
def test_what_a_cluster_is_asked_for(where: str) -> None:
    """What sbatch is told, and the plan."""
    name, *said = SEEDS[where]
    words, options = [word for word in said if word[0] != "-"], [word for word in said if word[0] == "-"]
    gpus = [int(option.partition("=")[2]) for option in options]
    site, _, nodes = where.partition("-")
    words += [f"nodes={nodes or 2}"]
    path = ROOT / "recipes" / f"{name}.toml"
    found = sites.find(site)
    asked = queue.options(read_recipe(path, words), found, *gpus or [found.gpus_per_node], None)
    ended = dray("plan", "-v", path, *words, *options, "--site", site, "--runs", "/runs", SBATCH_ACCOUNT="p1")
    assert (ended.returncode, ended.stderr) == (0, "")
    same(f"seed-{where}.txt", f"sbatch {shlex.join(asked)}\n\n{ended.stdout}")


def test_two_machines_without_a_scheduler() -> None:
    path = ROOT / "recipes" / "gpt2-micro-owt.toml"
    recipe = read_recipe(path, ["checkpoint.folder=/shared/micro"])
    seen = Facts(
        scheduler="hosts", nodelist="machine[1-2]", nodes=2, gpus_per_node=8, engine="docker", image="dray:cuda"
    )
    made = plan(
        recipe, sites.find("generic"), seen,
        run_folder=PurePosixPath("/runs/20261122-000000-gpt2-micro-owt-abcdef"), scratch="/tmp/dray-7-r", dray="0",
    )  # fmt: skip
    same("seed-hosts-gpt2-micro-owt.txt", render.text(made))


def test_checkpoints_of_several_machines_want_one_disk() -> None:
    seen = Facts(scheduler="hosts", nodelist="m[1-2]", nodes=2, gpus_per_node=8, engine="docker", image="dray:cuda")
    recipe = read_recipe(ROOT / "recipes" / "gpt2-micro-owt.toml")
    made = plan(
        recipe, sites.find("generic"), seen, run_folder=PurePosixPath("/runs/r"), scratch="/tmp/dray-7-r", dray="0"
    )
    with pytest.raises(ConfigError, match=r"hostfile runs need a shared checkpoint\.folder"):
        made.refuse()


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ('scale = "huge"', (), 'scale = "huge"   expected one of "whole", "tiny"'),
        ("", ("scale=tiny",), "the recipe has no table [tiny] with settings for it"),
        ('tiny = "small"', ("scale=tiny",), 'tiny = "small"   expected a table'),
        ("[tiny]\nnodez = 1", ("scale=tiny",), "nodez = 1   unknown key: did you mean `nodes`?"),
        ("[tiny.train]\nsteps = 0", ("scale=tiny",), "train.steps = 0   expected a whole number of at least 1"),
        ("[tiny.train]\nsteps = 3", ("scale=tiny", "train.steps=x"), "train.steps=x   expected a whole number"),
    ],
)
def test_a_scale_that_cannot_be(tmp_path: Path, text: str, words: tuple[str, ...], said: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(f'name = "r"\n{text}\n[batch]\nglobal_size = 1\n[train]\nsteps = 1\nlr = 1e-3\n')
    ended = dray("recipe", "check", path, *words)
    assert ended.returncode == 78
    assert said in ended.stderr


BASE = """name = "r"
[batch]
global_size = 1
[train]
steps = 30
warmup_steps = 20
lr = 1e-3
[tiny.train]
steps = 29
"""
NOT_FINITE = "model.config   expected finite numbers: a model's config.json has neither inf nor nan (command line)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("tiny.train.steps=5",),
            "tiny.train.steps=5   has no effect: the command line overrides [tiny]; set train.steps=5",
        ),
        (
            ("scale=tiny", "tiny={}"),
            "tiny={}   has no effect: the command line overrides [tiny]; set KEY={}",
        ),
        (("model.config.x=[1.0, inf]",), NOT_FINITE),
        (("model.config.x={a=[[nan]]}",), NOT_FINITE),
        (("model.config.x=[-inf]", "scale=tiny"), NOT_FINITE),
        (("train.betas=[0.9, nan]",), "train.betas=[0.9, nan]   expected a finite number (command line)"),
        (("lora.alpha=inf",), "lora.alpha=inf   expected a finite number (command line)"),
        (
            ("launcher=torchrn",),
            'launcher=torchrn   expected one of "torchrun", "accelerate", "deepspeed", "python", "ray" (command line)',
        ),
        (
            ("train.steps=2",),
            "train   warmup_steps = 20 is more than steps = 2; set train.warmup_steps=0 too, or at most 2",
        ),
    ],
)
def test_nothing_is_accepted_and_ignored(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(BASE)
    with pytest.raises(ConfigError) as refused:
        read_recipe(path, words)
    assert str(refused.value) == f"recipe {path} has 1 error\n  found:  {said}"


@pytest.mark.seconds
@pytest.mark.parametrize("key", ["data.train", "data.validation", "data.test", "evaluate.a.dataset", "model.tokenizer"])
@pytest.mark.parametrize("named", ["./nofolder", "./no*.txt"])
def test_a_path_that_is_not_there_is_not_good(tmp_path: Path, key: str, named: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(BASE)
    ended = dray("recipe", "check", path, f"{key}={named}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        78,
        "",
        f"dray: files that the recipe names are missing on this machine\n  where:  {path}\n"
        "  wanted: a file, a folder or a pattern that matches files\n"
        f"  found:  {key} = {tmp_path}/{Path(named)}\n"
        "  fix:    correct the path, or check the recipe on a machine that has the file\n",
    )
    (tmp_path / "nofolder").mkdir()
    (tmp_path / "no1.txt").touch()
    assert dray("recipe", "check", path, f"{key}={named}").returncode == 0


@pytest.mark.seconds
def test_a_near_name_can_be_typed(tmp_path: Path) -> None:
    """From the checkout, and from a folder without recipes."""
    for folder, name in ((ROOT, "recipes/smoke-cpu.toml"), (tmp_path, f"{ROOT}/recipes/smoke-cpu.toml")):
        ended = dray("plan", "recipes/smoke-cpu.tml", cwd=folder)
        assert ended.returncode == 78
        assert f"  fix:    did you mean `{name}`?" in ended.stderr
        assert dray("plan", name, cwd=folder).returncode == 0


def test_the_command_line_wins_over_tiny(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(
        'name = "r"\nscale = "tiny"\n[batch]\nglobal_size = 1\n[train]\nsteps = 9\nlr = 1e-3\nseed = 4\n'
        "[tiny.train]\nsteps = 2\nlr = 1e-2\n"
    )
    train = read_recipe(path, ["train.lr=1.0"]).train
    assert train
    assert (train.steps, train.lr, train.seed) == (2, 1.0, 4)
    whole = read_recipe(path, ["scale=whole"]).train
    assert whole
    assert (whole.steps, whole.lr) == (9, 1e-3)


@pytest.mark.seconds
def test_a_tiny_that_is_wrong_is_said_before_anybody_walks_it(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('name = "r"\n[batch]\nglobal_size = 1\n[train]\nsteps = 9\nlr = 1e-3\n[tiny.train]\nstepz = 2\n')
    ended = dray("recipe", "check", path)
    assert (ended.returncode, "train.stepz = 2   unknown key" in ended.stderr) == (78, True)
