"""`dray submit --run`: the next attempt of a run that is there; and `dray run` in the allocation of an salloc."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

import command
from dray.contract.findings import ConfigError
from dray.runs import submit
from dray.runs.slurm import Allocation
from dray.runs.store import run_named
from helpers import ROOT
from slurms import Slurm

SALLOC = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}


def dray(*words: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return command.dray(*words, cwd=cwd, **{**os.environ, "DRAY_HOME": str(ROOT), **env})


@pytest.mark.parametrize(
    ("word", "run"),
    [
        ("", None),
        ("mine", "/my runs/mine"),
        ("/other/mine", "/other/mine"),
        ("/other/mine/attempt-3", "/other/mine"),
    ],
)
def test_which_run_is_named(word: str, run: str | None) -> None:
    assert run_named(Path("/my runs"), word) == (Path(run) if run else None)


@pytest.mark.parametrize("word", ["a b", "/", "/other/-x", "x" * 129])
def test_a_name_that_no_run_can_have(word: str) -> None:
    with pytest.raises(ConfigError, match="this is no valid name for a run"):
        run_named(Path("/my runs"), word)


@pytest.mark.seconds
def test_the_next_attempt_of_a_run_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder and number go to sbatch; a job that Slurm refuses takes nothing away."""
    slurm = Slurm(tmp_path, monkeypatch)
    run = tmp_path / "my runs" / "mine"
    (run / "attempt-1").mkdir(parents=True)
    (tmp_path / "i.sif").write_bytes(b"hsqs")
    tool = slurm.folder / "bin" / "sbatch"
    tool.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >"{tmp_path}/argv"\necho "42;local"\n')
    words = ("submit", ROOT / "recipes" / "smoke-cpu.toml", "--runs", run.parent, "--run=mine", "train.steps=99")
    ended = dray(*words, cwd=tmp_path, DRAY_IMAGE=str(tmp_path / "i.sif"))
    assert (ended.returncode, ended.stdout) == (0, f"job 42 is in the queue, for attempt 2\nrun folder: {run}\n")
    assert (tmp_path / "argv").read_text().split("\0")[:-1] == [
        "--parsable",
        f"--output={run}/job-%j.log",
        "--job-name=smoke-cpu",
        "--nodes=2",
        "--ntasks-per-node=1",
        f"{ROOT}/slurm/multinode.sh",
        f"--run={run}",
        f"--image={tmp_path}/i.sif",
        "--site=",
        f"{ROOT}/recipes/smoke-cpu.toml",
        "train.steps=99",
    ]
    queued = json.loads((run / "job.json").read_text())
    assert (queued["job"], queued["cluster"]) == (42, "local")
    tool.write_text("#!/bin/bash\nexit 1\n")
    assert dray(*words, cwd=tmp_path, DRAY_IMAGE=str(tmp_path / "i.sif")).returncode == 1
    assert json.loads((run / "job.json").read_text()) == queued


def test_a_run_that_goes_on_gets_no_second_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, run = Slurm(tmp_path, monkeypatch), tmp_path / "mine"
    submit.require_free(run, [])
    run.mkdir()
    for ago, refused_by in ((3600, ""), (1, "it was submitted or began a moment ago, so squeue does not list it yet")):
        (run / "job.json").write_text(json.dumps({"job": 17, "time": time.time() - ago, "argv": []}))
        with pytest.raises(ConfigError) if refused_by else nullcontext() as refused:
            submit.require_free(run, [])
        assert not refused or refused.value.finding.found == refused_by
    slurm.has(17, "PENDING")
    with pytest.raises(ConfigError) as refused:
        submit.require_free(run, ["--time=10"])
    assert (refused.value.finding.found, refused.value.finding.fix) == (
        "job 17, PENDING",
        f"dray stop {run}; or wait for it: --sbatch=--dependency=afterany:17",
    )
    submit.require_free(run, ["--dependency=afterany:17"])


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        ({}, True),
        ({"SLURM_STEP_ID": "4294967290"}, True),
        ({"SLURM_STEP_ID": "0"}, False),
        ({"ENVIRONMENT": "BATCH"}, False),
        ({"SLURM_JOB_NODELIST": ""}, False),
    ],
)
def test_which_shell_is_in_an_allocation(more: dict[str, str], *, taken: bool) -> None:
    assert bool(Allocation.of({**SALLOC, **more})) is taken


class TestInAnAllocation:
    """`bash` is a stand-in that shows what it was given."""

    @pytest.fixture
    def show(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        tool = tmp_path / "bin" / "bash"
        tool.parent.mkdir()
        tool.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep -E "^(DRAY_RUNS|SLURM_SUBMIT_DIR)="\n')
        tool.chmod(0o755)
        for name, value in {**SALLOC, "PATH": f"{tool.parent}:{os.environ['PATH']}"}.items():
            monkeypatch.setenv(name, value)
        return tmp_path

    def test_it_is_taken(self, show: Path) -> None:
        words = ("run", "recipes/smoke-cpu.toml", "train.steps=99", "--ranks=2", "--run=mine", "--site=iris")
        ended = dray(*words, cwd=show)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines() == [
            "in the allocation of this shell, without a queue: job 17 on n[1-2] (--local: on this machine alone)",
            f"{ROOT}/slurm/multinode.sh",
            f"--run={show}/runs/mine",
            "--site=iris",
            f"{ROOT}/recipes/smoke-cpu.toml",
            "train.steps=99",
            "ranks_per_node=2",
            *sorted((f"DRAY_RUNS={show}/runs", f"SLURM_SUBMIT_DIR={show}"), key=ended.stdout.index),
        ]

    def test_a_command_and_one_node(self, show: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
        ended = dray("run", "--", "train.py", "--note", "a b", cwd=show)
        assert ended.stdout.splitlines()[1:5] == [f"{ROOT}/slurm/singlenode.sh", "--", "train.py", "--note"]

    @pytest.mark.seconds
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--nodes=3",), "a run in an allocation uses all of its nodes"),
            (("--gpus-per-node=4",), "--gpus-per-node is set by salloc; --ranks sets the number of ranks"),
        ],
    )
    def test_what_the_allocation_decides(self, show: Path, words: tuple[str, ...], said: str) -> None:
        ended = dray("run", "recipes/smoke-cpu.toml", *words, cwd=show)
        assert (ended.returncode, ended.stderr.splitlines()[0]) == (78, f"dray: {said}")

    @pytest.mark.seconds
    @pytest.mark.parametrize("words", [("--local",), ("--engine", "bare")])
    def test_it_stays_here(self, show: Path, words: tuple[str, ...]) -> None:
        ended = dray("run", "recipes/smoke-cpu.toml", *words, "batch.global_size=7", cwd=show)
        assert "in the allocation" not in ended.stdout
        assert "batch.global_size" in ended.stderr
