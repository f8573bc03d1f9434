"""A task of an array, as its batch script sees it: a line of the study's file gives it its run and its settings."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from helpers import PYTHON, ROOT
from jobs import Job

LINES = "s-1\ttrain.lr=1e-3\ns-2\tdata.train=/my data/*.jsonl\tenv.X=$(id) \"'`\\\ns-3\n"
FAKE_SBATCH = """#!/bin/bash
printf '%s\\0' "$@" >"$CALLS"
echo 20
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    study = tmp_path / "my runs" / "s"
    study.mkdir(parents=True)
    (study / "tasks").write_text(LINES)
    (study / "tasks").chmod(0o600)
    return study / "tasks"


def given(*words: str | Path, task: str | None = "1") -> subprocess.CompletedProcess[str]:
    """What the script takes these arguments for, with a NUL behind each."""
    script = """set -euo pipefail; source "$DRAY_HOME/slurm/job.sh"; job::task "$@"; printf '%s\\0' "${given[@]}" """
    env = {**PYTHON, "DRAY_HOME": str(ROOT)} | ({} if task is None else {"SLURM_ARRAY_TASK_ID": task})
    argv = ["bash", "-c", script, "job", *map(str, words)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("task", "own"),
    [
        ("1", ["train.lr=1e-3"]),
        ("2", ["data.train=/my data/*.jsonl", "env.X=$(id) \"'`\\"]),
        ("3", []),
    ],
)
def test_a_line_is_a_run_and_its_settings(tasks: Path, task: str, own: list[str]) -> None:
    """Nothing in it is a pattern or a command; what is the recipe's own comes before it."""
    words = (f"--tasks={tasks}", "--image=/i.sif", "--site=", "my recipe.toml", "train.steps=9")
    ended = given(*words, task=task)
    run = f"--run={tasks.parent.parent}/s-{task}"
    assert ended.stdout.split("\0")[:-1] == [run, *words[1:], *own], ended.stderr
    ended = given(*words, "--", "python3", "x=1", task=task)
    assert ended.stdout.split("\0")[:-1] == [run, *words[1:], *own, "--", "python3", "x=1"]


def test_without_it_nothing_changes() -> None:
    words = ("--run=x", "a.toml", "--tasks=x", "b=c", "--", "--tasks=y")
    assert given(*words).stdout.split("\0")[:-1] == [*words]
    assert given().stdout == "\0" or given().stdout == ""


def refused(ended: subprocess.CompletedProcess[str]) -> list[str]:
    assert (ended.returncode, ended.stdout) == (78, ""), ended.stderr
    return ended.stderr.splitlines()


@pytest.mark.hostile("arrays")
@pytest.mark.parametrize("task", [None, "", "0", "-1", "1x", "1_2", "9999999999", "a[$(id)]"])
def test_a_job_that_is_no_task(tasks: Path, task: str | None) -> None:
    lines = refused(given(f"--tasks={tasks}", "a.toml", task=task))
    assert lines[0] == "dray: --tasks works only in a task of a job array"
    assert lines[1] == f"  found:  SLURM_ARRAY_TASK_ID={task or ''}"


@pytest.mark.hostile("arrays")
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("link", f"a symbolic link of user {os.geteuid()}, mode 777"),
        ("fifo", f"a fifo of user {os.geteuid()}, mode "),
        ("folder", f"a directory of user {os.geteuid()}, mode "),
        ("none", "no file"),
        ("written by a group", f"a regular file of user {os.geteuid()}, mode 660"),
        ("written by all", f"a regular file of user {os.geteuid()}, mode 602"),
        ("relative", "no file"),
        ("short", "no file"),
    ],
)
def test_a_file_that_others_may_have_made(tasks: Path, kind: str, found: str) -> None:
    file = str(tasks)
    match kind:
        case "written by a group" | "written by all":
            tasks.chmod(int(found[-3:], 8))
        case "relative" | "short":
            file = "s/tasks" if kind == "relative" else "/tasks"
        case _:
            tasks.rename(tasks.with_name("other"))
    if kind == "link":
        tasks.symlink_to("other")
    elif kind == "fifo":
        os.mkfifo(tasks)
    elif kind == "folder":
        tasks.mkdir()
    problem, where, wanted, seen, fix = refused(given(f"--tasks={file}", "a.toml"))
    assert problem == "dray: the file with the tasks of this array is not used"
    assert fix == "  fix:    submit the study again"
    assert where == f"  where:  {file}"
    assert wanted == f"  wanted: the whole path of a file of user {os.geteuid()}, which nobody else may write"
    assert seen.startswith(f"  found:  {found}")


@pytest.mark.hostile("arrays")
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give a file away")
def test_another_user_s_file(tasks: Path) -> None:
    os.chown(tasks, 4321, -1)
    assert refused(given(f"--tasks={tasks}", "a.toml"))[3] == "  found:  a regular file of user 4321, mode 600"


@pytest.mark.hostile("arrays")
@pytest.mark.parametrize(
    "line",
    [
        "", "\tx=1", "../s-1", "/etc", ".hidden", "s-1\t--", "s-1\t--image=/theirs.sif", "s-1\t\tx=1", "s-1\ttrain.lr",
        "s-1 x=1", "x" * 300, "s-1\x1b[2J", None,
    ],
)  # fmt: skip
def test_a_line_that_is_none(tasks: Path, line: str | None) -> None:
    tasks.write_text("" if line is None else f"{line}\n")
    quote = ["bash", "-c", 'printf %q "${1:0:200}"', "x", line or ""]
    quoted = subprocess.run(quote, capture_output=True, text=True, check=True).stdout
    assert refused(given(f"--tasks={tasks}", "a.toml")) == [
        "dray: the file with the tasks of this array has no valid line for this task",
        f"  where:  {tasks}, line 1",
        "  wanted: a run's name, then its settings, separated by tabs",
        f"  found:  {quoted if line else 'no such line'}",
        "  fix:    submit the study again",
    ]


def array(task: int) -> dict[str, str]:
    return {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": str(task)}


@pytest.mark.seconds
def test_a_task_begins_its_own_run_and_goes_on_in_it(tmp_path: Path, tasks: Path) -> None:
    """Requeued, it has the same number, and the next attempt."""
    job = Job(tmp_path)
    tasks.write_text("s-1\ttrain.steps=47\ns-2\ttrain.steps=48\n")
    words = (f"--tasks={tasks}", "recipes/smoke-cpu.toml", "train.steps=9", "ranks_per_node=1")
    runs = tasks.parent.parent
    for task, attempt, steps in ((2, 1, 48), (1, 1, 47), (2, 2, 48)):
        ended = job.plan(*words, **array(task), SLURM_RESTART_COUNT=str(attempt - 1))
        folder = runs / f"s-{task}" / f"attempt-{attempt}"
        assert f"attempt {folder}\n" in ended.stdout, ended.stderr
        assert json.loads((folder / "plan.json").read_text())["recipe"]["train"]["steps"] == steps
        assert f"\ntask=17_{task}\n" in (folder / "facts.txt").read_text()
    assert not job.runs.exists()


def test_a_job_that_follows_a_task_goes_on_in_its_run_with_its_settings(tmp_path: Path, tasks: Path) -> None:
    """It is no task of an array."""
    job = Job(tmp_path)
    job.tool("sbatch", FAKE_SBATCH)
    words = (f"--tasks={tasks}", "--site=", "recipes/smoke-cpu.toml", "train.steps=9")
    run = f"{tasks.parent.parent}/s-2"
    script = f"""set -euo pipefail; source "$DRAY_HOME/slurm/job.sh"
        plan::attempt() {{ attempt={shlex.quote(run)}/attempt-1; mkdir -p "$attempt"; }}
        job::start() {{ end::follow --job-name=tiny; }}; job::lease() {{ :; }}; job::main "$@" """
    ended = subprocess.run(
        ["bash", "-c", script, "job", *words],
        env={**job.env, **array(2), "CALLS": str(tmp_path / "calls")}, cwd=job.home, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "follow-on: job 20 goes on in this run folder" in ended.stdout, ended.stderr
    assert (tmp_path / "calls").read_text().split("\0")[:-1] == [
        "--parsable", "--dependency=afterany:17_2", "--nodes=1", "--job-name=tiny",
        f"{job.home}/slurm/multinode.sh",
        f"--run={run}", f"--run={run}", "--site=", "recipes/smoke-cpu.toml", "train.steps=9",
        "data.train=/my data/*.jsonl", "env.X=$(id) \"'`\\",
    ]  # fmt: skip
