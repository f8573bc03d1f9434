"""`dray replay`: the same again, what it promises, and what it refuses to run."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import tarfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import typer

import command
from capsules import NODE, begun, nodes, steps
from dray.cli import report as cli
from dray.contract.findings import ConfigError
from dray.runs import capsule, replay, store
from dray.runs.compare import LossComparison
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe
from dray.runs.report import archive
from dray.runs.store import RunPaths
from dray.runs.store import plan_of as read
from helpers import ROOT

LOSSES = (2.0, 1.5)
IDENTICAL = "losses are identical to the last bit in 3 steps"


def dray(*words: str | Path, runs: Path) -> subprocess.CompletedProcess[str]:
    return command.dray(*words, HOME="/home/me", DRAY_RUNS=str(runs), NO_COLOR="1")


def verb(*words: str | Path, code: int = 0) -> str:
    """What the verb prints."""
    app = typer.Typer()
    app.command()(cli.replay)
    with redirect_stdout(io.StringIO()) as printed:
        assert (app([str(word) for word in words], standalone_mode=False) or 0) == code
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.torch
def test_a_run_again_has_the_same_losses(tmp_path: Path) -> None:
    """A real run, and again from its recipe."""
    small = [
        "train.steps=3", "train.warmup_steps=1", "train.log_every=1", "model.config.n_layer=1", "nodes=1",
        "ranks_per_node=1", "checkpoint.every=2", f"checkpoint.folder={tmp_path}/kept",
    ]  # fmt: skip
    first = dray("run", "recipes/smoke-cpu.toml", *small, "--run", "first", runs=tmp_path / "runs")
    assert first.returncode == 0, first.stderr
    made = capsule.read(RunPaths(tmp_path / "runs" / "first"))
    assert ([node.name for node in made.nodes], [*made.data]) == (["node1"], ["train", "eval"])
    assert made.nodes[0].packages["torch"] == made.torch
    again = dray("replay", "first", runs=tmp_path / "runs")
    assert (again.returncode, again.stderr) == (0, "")
    told = again.stdout.splitlines()
    assert told[0] == "nothing differs from the run, as far as dray can tell before the start"
    assert IDENTICAL in told
    dray("replay", "first", "--recipe", tmp_path / "again.toml", runs=tmp_path / "runs")
    dray("run", tmp_path / "again.toml", "--run", "again", runs=tmp_path / "runs")
    compared = dray("diff", "first", "again", runs=tmp_path / "runs").stdout.splitlines()
    assert [line.split()[:2] for line in compared if "checkpoint" in line] == [["keeping:", "checkpoint.folder:"]]
    assert IDENTICAL in compared


def test_what_a_replay_leaves_out(tmp_path: Path) -> None:
    paths = begun(
        tmp_path, "checkpoint.every=2", f"checkpoint.folder={tmp_path}/kept", "train.trackers=['mlflow']",
        "max_requeues=3", "env={}",
    )  # fmt: skip
    nodes(paths)
    plan, recipe = read(paths), replay.original(paths.run).recipe
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


def test_a_replay_must_have_every_loss_of_the_run() -> None:
    assert replay.same(LossComparison(steps=3, only_b=2))  # the run was stopped early
    assert not replay.same(LossComparison(steps=3, only_a=1))
    assert not replay.same(LossComparison(steps=0))
    assert not replay.same(LossComparison(steps=3, first=2))


def ended(runs: Path, *words: str) -> RunPaths:
    paths = begun(runs, *words)
    nodes(paths, **NODE)
    steps(paths, *LOSSES)
    finish(paths, code=1)
    return paths


def test_a_copy_of_a_run_is_written_and_not_started(tmp_path: Path) -> None:
    paths = ended(tmp_path / "runs", "env.LD_PRELOAD=/tmp/evil.so")
    archive.make(paths.run, tmp_path / "x.tar.gz", why="")
    with tarfile.open(tmp_path / "x.tar.gz") as packed:
        packed.extractall(tmp_path)
    copy, again = tmp_path / "dray-why-mine", tmp_path / "again.toml"
    with pytest.raises(ConfigError) as refused:
        verb(copy)
    assert str(refused.value).splitlines() == [
        "dray replays only your own runs",
        "  wanted: a run folder that only you may write",
        f"  found:  {copy}, a copy without secret",
        f"  fix:    dray replay {copy} --recipe again.toml; read it; then dray submit again.toml",
    ]
    assert verb(copy, "--recipe", again).splitlines() == [
        f"another user may have written this run ({copy}, a copy without secret): read {again} first, since it may run "
        "code",
        f"dray submit {again} --nodes 1, and then: dray diff RUN NEW_RUN",
    ]
    assert read_recipe(again).env["LD_PRELOAD"] == "/tmp/evil.so"


@pytest.mark.parametrize("part", [".", "attempt-1", "attempt-1/plan.json", "attempt-1/capsule.json"])
def test_a_run_that_others_may_change_is_not_started(tmp_path: Path, part: str) -> None:
    paths = ended(tmp_path / "runs")
    assert store.foreign_path(paths) == ""
    changed = paths.run / part
    changed.chmod(changed.stat().st_mode | 0o020)
    with pytest.raises(ConfigError, match="dray replays only your own runs"):
        verb(paths.run)
    changed.chmod(changed.stat().st_mode & ~0o020)
    if os.geteuid() == 0:  # only root gives a file away
        os.chown(changed, 65534, 65534)
        assert store.foreign_path(paths).startswith(f"{changed} of user 65534, mode ")
        again = tmp_path / "again.toml"
        assert verb(paths.run, "--recipe", again).startswith(f"another user may have written this run ({changed} of")


def test_no_settings_of_a_scale_are_left_for_the_job_to_apply(tmp_path: Path) -> None:
    """The plan has them applied; those that a capsule adds would be applied behind the user's back."""
    paths = begun(tmp_path / "runs")
    plan = read(paths)
    evil = plan.recipe.model_copy(update={"scale": "tiny", "tiny": {"env": {"PYTHONPATH": "/tmp/evil"}}})
    run = dataclasses.replace(replay.original(paths.run), plan=plan.model_copy(update={"recipe": evil}))
    for name, text in replay.as_files(run.recipe, "again").items():
        (tmp_path / name).write_text(text)
    assert "PYTHONPATH" not in read_recipe(tmp_path / "again.toml").env


def test_a_run_on_gpus_that_is_not_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = replay.original(ended(tmp_path).run)
    other = begun(tmp_path, run="other")
    steps(other, 2.0, 1.25)
    monkeypatch.setattr(replay.Original, "gpus", 1)
    with redirect_stdout(io.StringIO()) as printed:
        assert (cli._compare(first, other.run, 75), cli._compare(first, other.run, 0)) == (75, 1)
    assert f"the replay failed with exit code 75: dray why {other.run}\n" in printed.getvalue()
    assert printed.getvalue().splitlines()[-1] == (
        "train.deterministic = false: on GPUs, the same run has other losses each time"
    )


def test_a_run_of_slurm_s_is_submitted_again(tmp_path: Path) -> None:
    plan = read(begun(tmp_path))
    slurm = plan.model_copy(update={"world": plan.world.model_copy(update={"task": ("SLURM_PROCID",)})})
    assert (replay.engine_here(slurm, "docker"), replay.engine_here(plan, "")) == ("docker", "bare")
    for before, engine in ((slurm, ""), (plan, "apptainer")):
        with pytest.raises(ConfigError, match="this run cannot be repeated on this machine as it was"):
            replay.engine_here(before, engine)
