"""`dray replay`: the same again, what it promises, and what it refuses to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from capsules import NODE, begun, nodes, steps
from dray.contract.findings import ConfigError
from dray.runs import capsule, pack, replay, trust
from dray.runs.capsule_schema import Capsule
from dray.runs.diff import Difference
from dray.runs.effect import Parting
from dray.runs.finish import finish
from dray.runs.store import RunPaths
from dray.runs.write import read, read_recipe
from helpers import PYTHON, ROOT

LOSSES = (2.0, 1.5)


def dray(*words: str | Path, runs: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dray", *words]
    env = {**PYTHON, "HOME": "/home/me", "DRAY_RUNS": str(runs), "NO_COLOR": "1"}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.torch
def test_a_run_again_has_the_same_losses(tmp_path: Path) -> None:
    """A real run, packed, and again from the archive's recipe."""
    small = [
        "train.steps=3", "train.warmup_steps=1", "train.log_every=1", "model.config.n_layer=1", "nodes=1",
        "ranks_per_node=1", "checkpoint.every=2", f"checkpoint.folder={tmp_path}/kept",
    ]  # fmt: skip
    first = dray("run", "recipes/smoke-cpu.toml", *small, "--run", "first", runs=tmp_path / "runs")
    assert first.returncode == 0, first.stderr
    made = capsule.read(RunPaths(tmp_path / "runs" / "first"))
    assert (made.status, [node.name for node in made.nodes], [*made.data]) == ("done", ["node1"], ["train", "eval"])
    assert made.image.packages["torch"] == made.torch
    packed = tmp_path / "first.tar.gz"
    pack.make(tmp_path / "runs" / "first", packed)
    again = dray("replay", "first", runs=tmp_path / "runs")
    assert (again.returncode, again.stderr) == (0, "")
    told = again.stdout.splitlines()
    assert told[0] == "nothing differs from the run, as far as dray can tell before the start"
    assert told[-1] == "all 3 losses are identical to the last bit"
    dray("replay", packed, "--recipe", tmp_path / "again.toml", runs=tmp_path / "runs")
    dray("run", tmp_path / "again.toml", "--run", "again", runs=tmp_path / "runs")
    compared = dray("replay", packed, "--compare", "again", runs=tmp_path / "runs")
    assert compared.stdout.splitlines()[-1] == "all 3 losses are identical to the last bit"
    compared = dray("diff", "first", runs=tmp_path / "runs").stdout.splitlines()
    assert [line.split()[:2] for line in compared if "checkpoint" in line] == [["keeping", "checkpoint.folder"]]


def test_what_a_replay_leaves_out(tmp_path: Path) -> None:
    paths = begun(
        tmp_path, "checkpoint.every=2", f"checkpoint.folder={tmp_path}/kept", "train.trackers=['mlflow']",
        "max_requeues=3", "env={}",
    )  # fmt: skip
    nodes(paths)
    plan = read(paths)
    recipe = replay.recipe_of(plan, capsule.of(paths, plan))
    assert recipe.train
    assert (recipe.checkpoint.folder, recipe.train.trackers, recipe.max_requeues) == ("", (), 0)
    assert (recipe.env, recipe.ranks_per_node, recipe.nodes) == ({"OMP_NUM_THREADS": "4"}, plan.world.ranks_per_node, 1)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_a_recipe_as_a_file_is_the_same_recipe(path: Path, tmp_path: Path) -> None:
    """With DeepSpeed's file beside it, and a function on rows in it, which a user can read."""
    code = 'def same(row):\n    # a row, "as it is"\n    return {**row, "text": row["text"] + "\\t" + \'"""\'}\n'
    (tmp_path / "rows.py").write_text(code)
    recipe = read_recipe(path, [f"data.map={tmp_path}/rows.py:same"])
    assert '\n    # a row, "as it is"\n' in replay.as_files(recipe, "again")["again.toml"]
    for name, text in replay.as_files(recipe, "again").items():
        (tmp_path / name).write_text(text)
    assert read_recipe(tmp_path / "again.toml") == recipe


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Capsule:
    """Of a run that has told all."""
    return capsule.read(ended(tmp_path_factory.mktemp("told")))


def differs(kind: str, name: str) -> Difference:
    return Difference(kind=kind, name=name, a="1", b="2")


@pytest.mark.parametrize(
    ("found", "promised"),
    [
        ([], True),
        ([differs("nodes", "names"), differs("nodes", "kernel"), differs("keeping", "spares")], True),
        ([differs("versions", "rich"), differs("code", "commit"), differs("image", "image")], True),
        ([differs("image", "image_sha256")], False),
        ([differs("versions", "torch")], False),
        ([differs("nodes", "cpu")], False),
        ([differs("nodes", "threads")], False),
        ([differs("nodes", "world.size")], False),
        ([differs("data", "tokens of train")], False),
        ([differs("environment", "MKL_CBWR")], False),
    ],
    ids=str,
)
def test_when_losses_must_be_identical(told: Capsule, found: list[Difference], promised: bool) -> None:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
    assert (not replay.breaks(found, recipe, told)) is promised


def test_nothing_is_promised_of_what_was_not_recorded(told: Capsule) -> None:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
    unknown = "versions: the run recorded no packages or no nodes"
    assert replay.breaks([], recipe, told.model_copy(update={"nodes": ()})) == [unknown]


def test_a_gpu_promises_nothing_unless_it_is_deterministic(told: Capsule) -> None:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["image=cuda"])
    assert replay.breaks([], recipe, told) == ["training: train.deterministic is false, and this is a GPU"]
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["image=cuda", "train.deterministic=true"])
    assert not replay.breaks([], recipe, told)


def test_a_replay_must_have_every_loss_of_the_run() -> None:
    assert replay.same(Parting(steps=3, only_b=2))  # the run was stopped early
    assert not replay.same(Parting(steps=3, only_a=1))
    assert not replay.same(Parting(steps=0))
    assert not replay.same(Parting(steps=3, first=2))


def ended(runs: Path, *words: str) -> RunPaths:
    paths = begun(runs, *words)
    nodes(paths, **NODE)
    steps(paths, *LOSSES)
    finish(paths, code=1)
    return paths


@pytest.mark.seconds
def test_a_packed_run_is_written_and_not_started(tmp_path: Path) -> None:
    paths = ended(tmp_path / "runs", "env.LD_PRELOAD=/tmp/evil.so", "model.trust_remote_code=true", "model.name=x/y")
    packed, again = tmp_path / "x.tar.gz", tmp_path / "again.toml"
    pack.make(paths.run, packed)
    refused = dray("replay", packed, runs=tmp_path / "runs")
    assert refused.returncode == 78
    assert refused.stderr.splitlines() == [
        "dray: dray replays only your own runs",
        "  wanted: a run folder that only you may write",
        f"  found:  {packed}, a packed capsule",
        f"  fix:    dray replay {packed} --recipe again.toml; read it; then dray submit again.toml",
    ]
    written = dray("replay", packed, "--recipe", again, runs=tmp_path / "runs")
    assert written.returncode == 0
    assert "keys that run code: model.trust_remote_code, env.LD_PRELOAD\n" in written.stdout
    assert read_recipe(again).env["LD_PRELOAD"] == "/tmp/evil.so"


@pytest.mark.seconds
@pytest.mark.parametrize("part", [".", "attempt-1", "attempt-1/plan.json", "attempt-1/capsule.json"])
def test_a_run_that_others_may_change_is_not_started(tmp_path: Path, part: str) -> None:
    paths = ended(tmp_path / "runs")
    assert trust.foreign(paths) == ""
    changed = paths.run / part
    changed.chmod(changed.stat().st_mode | 0o020)
    refused = dray("replay", paths.run, runs=tmp_path / "runs")
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (78, "dray: dray replays only your own runs")
    changed.chmod(changed.stat().st_mode & ~0o020)
    if os.geteuid() == 0:  # only root gives a file away
        os.chown(changed, 65534, 65534)
        assert trust.foreign(paths).startswith(f"{changed} of user 65534, mode ")


def test_no_settings_of_a_scale_are_left_for_the_job_to_apply(tmp_path: Path) -> None:
    """The plan has them applied; those that a capsule adds would be applied behind the user's back."""
    paths = begun(tmp_path / "runs")
    plan = read(paths)
    evil = plan.recipe.model_copy(update={"scale": "tiny", "tiny": {"env": {"PYTHONPATH": "/tmp/evil"}}})
    again = replay.recipe_of(plan.model_copy(update={"recipe": evil}), capsule.of(paths, plan))
    for name, text in replay.as_files(again, "again").items():
        (tmp_path / name).write_text(text)
    assert "PYTHONPATH" not in read_recipe(tmp_path / "again.toml").env


@pytest.mark.seconds
@pytest.mark.parametrize("site", ["{folder}/evil.toml", "evil.toml", "../evil"])
def test_a_capsule_names_no_file_of_a_site(tmp_path: Path, site: str) -> None:
    """Its variables would be those of all ranks."""
    (tmp_path / "evil.toml").write_text(
        'name = "evil"\nabout = "a"\n[[env]]\nname = "PYTHONPATH"\nvalue = "/tmp/evil"\nwhy = "w"\n'
    )
    paths = ended(tmp_path / "runs")
    made = json.loads(paths.capsule.read_text())
    paths.capsule.write_text(json.dumps(made | {"site": site.format(folder=tmp_path)}))
    refused = dray("replay", "mine", runs=tmp_path / "runs")
    assert refused.returncode == 78
    assert "the run's capsule is damaged" in refused.stderr
    assert "site: String should match pattern" in refused.stderr


def test_a_run_of_slurm_s_is_submitted_again(tmp_path: Path) -> None:
    plan = read(begun(tmp_path))
    slurm = plan.model_copy(update={"world": plan.world.model_copy(update={"task": ("SLURM_PROCID",)})})
    with pytest.raises(ConfigError, match="this run was started by Slurm"):
        replay.require_here(slurm, "")
    assert replay.require_here(slurm, "docker") == "docker"
    assert replay.require_here(plan, "") == "bare"
    with pytest.raises(ConfigError, match="--engine has a wrong value"):
        replay.require_here(plan, "apptainer")
