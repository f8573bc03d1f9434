"""`dray clean`: what goes, what stays and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import command
import warm
from dray.contract import processes
from dray.facts import Facts
from dray.runs import clean
from dray.runs.clean import Item
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.store import RunPaths
from helpers import ROOT, bash_blocks, section
from slurms import Slurm

FACTS = Facts(scheduler="local", nodelist="node1", nodes=1, engine="bare", image=sys.executable, home="/home/me")


def begun(runs: Path, name: str, *words: str, **facts: object) -> RunPaths:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", words)
    return write(recipe, FACTS.model_copy(update=facts), runs=runs, run=name)[1]


def ended(runs: Path, name: str, *, model: bool = False, days: float = 90) -> RunPaths:
    paths = begun(runs, name)
    finish(paths, code=1)
    if model:
        (paths.checkpoints / "final").mkdir()
    return aged(paths, days)


def aged(paths: RunPaths, days: float) -> RunPaths:
    return old(paths.run, days) and paths  # type: ignore[return-value]


def old(folder: Path, days: float) -> bool:
    then = time.time() - days * 86400
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)
    return True


def looked(
    runs: Path, kind: str = "runs", *, days: float = 30, tokens: Path = Path("/none"), checkpoints: bool = False
) -> dict[str, Item]:
    found = clean.items([kind], runs=runs, tokens=tokens, days=days, checkpoints=checkpoints)
    return {item.path.name: item for item in found}


def test_which_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "my runs"
    failed, young = ended(runs, "failed"), ended(runs, "young", days=1)
    ended(runs, "trained", model=True)
    going = begun(runs, "going")
    going.process.write_text(json.dumps(processes.mark(os.getpid())))
    aged(begun(runs, "elsewhere"), 90)
    slurm = Slurm(tmp_path, monkeypatch)
    slurm.has(17, "RUNNING")
    job = {"scheduler": "slurm", "engine": "apptainer", "image": "/i.sif"}
    aged(begun(runs, "live", job=17, **job), 0.5)
    lost, _ = aged(begun(runs, "lost", job=18, **job), 90), aged(begun(runs, "killed", job=19, **job), 0.5)
    found = looked(runs, days=0)
    assert {item.path for item in found.values() if not item.kept} == {failed.run, young.run, lost.run}
    assert {name: item.kept for name, item in found.items() if item.kept} == {
        "going": f"active: process {os.getpid()}",
        "elsewhere": "active, or this machine cannot tell",
        "live": "active: job 17, RUNNING",
        "killed": "has no result and changed today",
        "trained": "has checkpoints or a model (--checkpoints)",
    }
    assert looked(runs)["young"].kept == "changed since --older-than"
    assert looked(runs, checkpoints=True)["trained"].kept == ""
    assert (slurm.folder / "calls").read_text().count("squeue") == 3


def test_slurm_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aged(begun(tmp_path / "runs", "mine", scheduler="slurm", job=17, engine="apptainer", image="/i.sif"), 90)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert looked(tmp_path / "runs")["mine"].kept == "active, or this machine cannot tell"


def test_what_a_live_run_needs_stays(tmp_path: Path) -> None:
    """Here it goes on from another one's checkpoints."""
    runs = tmp_path / "runs"
    used = ended(runs, "used", model=True)
    going = begun(runs, "going", f"checkpoint.folder={used.checkpoints}")
    going.process.write_text(json.dumps(processes.mark(os.getpid())))
    assert looked(runs, checkpoints=True)["used"].kept == "an active run needs it"


@pytest.mark.hostile("clean")
def test_no_link_is_followed_and_nothing_of_another_is_touched(tmp_path: Path) -> None:
    runs, mine = tmp_path / "runs", tmp_path / "mine"
    paths = ended(tmp_path, "mine")
    runs.mkdir()
    (runs / "link").symlink_to(mine)
    there = ended(runs, "there")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (there.run / "link").symlink_to(precious)
    old(there.run, 90)
    found = looked(runs)
    assert set(found) == {"there"}
    assert clean.remove(found["there"]) == ""
    assert (there.run.exists(), (precious / "file").read_text(), paths.plan.is_file()) == (False, "x", True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_run_is_not_listed(tmp_path: Path) -> None:
    paths = ended(tmp_path, "theirs")
    os.chown(paths.run, 4711, 4711)
    assert looked(tmp_path) == {}


def test_what_has_changed_since_stays(tmp_path: Path) -> None:
    paths = ended(tmp_path, "mine")
    item = looked(tmp_path)["mine"]
    (paths.run / "attempt-2").mkdir()
    assert (clean.remove(item), paths.run.exists()) == ("it changed since it was listed", True)


def tokens(cache: Path, name: str, days: float) -> Path:
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"dataset": f"/data/{name[0]}.txt"}))
    old(folder, days)
    return folder


def test_tokens_of_datasets(tmp_path: Path) -> None:
    cache = tmp_path / "my cache"
    cache.mkdir()
    (cache / f".{'a' * 24}.lock").touch()  # of a run that was killed
    for name, days in (("a" * 24, 90), ("b" * 24, 1), (f"{'c' * 24}.part-{'d' * 16}", 0)):
        tokens(cache, name, days)
    (cache / "mine").mkdir()
    (cache / ("e" * 24)).symlink_to("mine")
    cache.chmod(0o700)
    found = looked(tmp_path, "tokens", tokens=cache)
    assert {name[0]: (item.holds, item.kept) for name, item in found.items()} == {
        "a": ("/data/a.txt", ""),
        "b": ("/data/b.txt", "changed since --older-than"),
        "c": ("/data/c.txt", "is being written"),
    }
    assert clean.remove(found["a" * 24]) == ""
    assert len(list(cache.iterdir())) == 4
    cache.chmod(0o770)
    (item,) = looked(tmp_path, "tokens", tokens=cache).values()
    assert (item.path, item.kept) == (cache, "a folder that others may write, mode 0770")


def test_the_runs_of_a_tuning_are_runs(tmp_path: Path) -> None:
    """They are in the folder of its table."""
    done = ended(tmp_path / "tuning", "001")
    (tmp_path / "tuning" / "study.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "tuning")
    found = looked(tmp_path)
    assert {item.path: item.kept for item in found.values()} == {done.run: ""}


def dray(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return command.dray("clean", *words, cwd=cwd)


@pytest.mark.seconds
def test_it_shows_first(tmp_path: Path) -> None:
    """The whole verb: it removes with --yes alone."""
    paths, kept = ended(tmp_path / "runs", "failed"), ended(tmp_path / "runs", "trained", model=True)
    shown = dray("runs", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    *lines, total, last = shown.stdout.splitlines()
    assert sorted(line.split()[2:7] for line in lines) == [
        ["90.0", "days", "runs", str(paths.run), "failed"],
        ["90.0", "days", "runs", str(kept.run), "kept:"],
    ]
    assert total.startswith("to remove: 1 folder, ")
    assert last == "dray clean --yes, with the same options, removes them"
    assert paths.run.exists()
    assert dray("runs", "--yes", cwd=tmp_path).returncode == 0
    assert (paths.run.exists(), kept.final_model.is_dir()) == (False, True)


@pytest.mark.seconds
def test_tokens_go_only_after_a_yes(tmp_path: Path) -> None:
    folder = tokens(tmp_path / "cache", "a" * 24, 9)
    folder.parent.chmod(0o700)
    words = ("tokens", "--cache-dir", "cache", "--older-than", "7d")
    assert dray(*words, cwd=tmp_path).returncode == 0
    assert folder.exists()
    assert (dray(*words, "--yes", cwd=tmp_path).returncode, folder.exists()) == (0, False)
    tokens(tmp_path / "cache", "b" * 24, 9)
    folder.parent.chmod(0o777)
    kept = dray(*words, "--yes", cwd=tmp_path)
    assert (kept.returncode, "kept: a folder that others may write, mode 0777" in kept.stdout) == (0, True)
    assert (folder.parent / ("b" * 24)).exists()


@pytest.mark.seconds
@pytest.mark.hostile("clean")
@pytest.mark.parametrize("words", [("everything",), ("--older-than", "-1d"), ("--older-than", "\u0663d")])
def test_wrong_words(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = dray(*words, cwd=tmp_path)
    assert (ended.returncode, "Traceback" in ended.stderr) == (78, False)


@pytest.mark.seconds
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """Of an active run in this very process; the stop is asked for and not waited for."""
    block = bash_blocks(section("runs.md", "## Stop", "## Enter the container", "## Clean"))
    assert block.count("\n") == 3
    facts = {"nodelist": "node[1-2]", "nodes": 2}
    paths = begun(tmp_path / "runs", "mine", "nodes=2", **facts)
    paths.process.write_text(json.dumps(processes.mark(os.getpid())))
    program = warm.program(tmp_path / "bin" / "dray").parent
    (program / "nvidia-smi").write_text("#!/bin/sh\necho a GPU\n")
    (program / "nvidia-smi").chmod(0o755)
    env = {**os.environ, "PATH": f"{program}:{os.environ['PATH']}", "RUN": str(paths.run)}
    script = block.replace('stop "$RUN"', 'stop "$RUN" --no-wait')
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"mine, attempt 1 was asked to save and end: process {os.getpid()}\na GPU\n")
    assert paths.stop.read_text() == "dray stop\n"
