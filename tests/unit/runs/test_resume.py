"""`--run=NAME` and nothing else: the run goes on as the plan of its last attempt says."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dray.cli import run as verb
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.runs.prepare import last, read_recipe, write
from dray.runs.store import RunPaths
from dray.runs.store import plan_of as read
from helpers import ROOT
from jobs import Job
from slurms import Slurm

Capture = pytest.CaptureFixture[str]
SCRIPT = f"{ROOT}/slurm/multinode.sh"
SBATCH = """#!/bin/bash
printf '%s\\0' "$@" >"{here}/argv"
echo '42;local'
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """sbatch writes down what it got."""
    made = Slurm(tmp_path, monkeypatch)
    (made.folder / "bin" / "sbatch").write_text(SBATCH.format(here=tmp_path))
    (tmp_path / "i.sif").write_bytes(b"hsqs")
    (tmp_path / "train.py").touch()
    for name in ("DRAY_SITE", "DRAY_IMAGE", "SBATCH_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": ROOT, "RUNS": tmp_path / "runs"}.items():
        monkeypatch.setenv(f"DRAY_{name}", str(value))
    monkeypatch.chdir(tmp_path)
    return made


def submit(*words: str, command: tuple[str, ...] = ()) -> int:
    app = typer.Typer()
    app.command()(verb.submit)
    return int(app([*words], standalone_mode=False, obj=command) or 0)


def ran(home: Path, *settings: str, nodes: int = 2, job: int = 17, **more: object) -> RunPaths:
    """An attempt of the run `mine`, of a program in `home`."""
    given = {
        "scheduler": "slurm", "nodelist": f"n[1-{nodes}]", "nodes": nodes, "job": job, "engine": "apptainer",
        "image": str(home / "i.sif"), "image_given": True, "image_variant": "cpu",
    }  # fmt: skip
    recipe = read_recipe(None, settings, ("train.py", "--lr", "1e-4"))
    return write(recipe, Facts.model_validate(given | more), runs=home / "runs", run="mine")[1]


def submitted(run: Path, *options: str) -> None:
    argv = [
        "sbatch",
        "--parsable",
        f"--output={run}/job-%j.log",
        *options,
        SCRIPT,
        f"--run={run}",
        "--site=",
        "--",
        "x",
    ]
    (run / "job.json").write_text(json.dumps({"job": 17, "time": 1.0, "argv": argv}))


def given(home: Path) -> list[str]:
    return (home / "argv").read_text().split("\0")[:-1]


def argv(home: Path, *options: str, settings: tuple[str, ...] = ()) -> list[str]:
    run = home / "runs" / "mine"
    return [
        "--parsable", f"--output={run}/job-%j.log", *options, SCRIPT, f"--run={run}", f"--image={home}/i.sif",
        "--site=", *settings,
    ]  # fmt: skip


def test_the_name_of_a_run_is_enough(slurm: Slurm, tmp_path: Path, capsys: Capture) -> None:
    """Program, image, launcher and nodes are those of its plan; options of sbatch those of its job."""
    before = ran(tmp_path, "launcher=python", "ranks_per_node=2")
    submitted(before.run, "--job-name=train", "--nodes=1", "--account=p1", "--time=08:00:00", "--nodes=2")
    assert submit("--run=mine") == 0
    kept = ("--job-name=train", "--account=p1", "--time=08:00:00")
    assert given(tmp_path) == argv(tmp_path, *kept, "--nodes=2")
    told = capsys.readouterr()
    assert told.out.splitlines() == ["job 42 is in the queue, for attempt 2", f"run folder: {before.run}"]
    assert told.err.splitlines()[0] == (
        f"resumes mine by the plan of attempt 1: train.py --lr 1e-4; with {shlex.join(kept)}"
    )


def test_what_is_given_beside_it_wins(slurm: Slurm, tmp_path: Path, capsys: Capture) -> None:
    ran(tmp_path, "ranks_per_node=2")
    assert submit("--run=mine", "-N3", "launcher=python", "--sbatch=--time=10", "env.X=1") == 0
    site = ("--job-name=train", "--nodes=3", "--ntasks-per-node=1")
    settings = ("launcher=python", "env.X=1")
    assert given(tmp_path) == argv(tmp_path, *site, "--time=10", settings=settings)
    assert "; with launcher=python env.X=1\n" in capsys.readouterr().err


def test_a_command_beside_it_is_the_run_s_from_now_on(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    ran(tmp_path)
    monkeypatch.setenv("DRAY_IMAGE", str(tmp_path / "i.sif"))
    (tmp_path / "other.py").touch()
    assert submit("--run=mine", "image=cpu", command=("other.py",)) == 0
    assert given(tmp_path)[-2:] == ["--", "other.py"]
    assert "resumes" not in capsys.readouterr().err


def test_a_job_that_lost_nodes_gets_as_many_as_it_had(tmp_path: Path) -> None:
    for nodes, job in ((4, 16), (3, 17), (2, 17)):
        paths = ran(tmp_path, nodes=nodes, job=job)
    assert len(read(paths).world.nodes) == 2
    assert last(paths.run).recipe.nodes == 3


def test_without_a_job_the_last_size_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for nodes in (4, 2):
        paths = ran(tmp_path, nodes=nodes, scheduler="local", job=0)
    assert last(paths.run).recipe.nodes == 2


def test_gpus_are_asked_for_again(tmp_path: Path) -> None:
    paths = ran(tmp_path, "image=cuda", gpus_per_node=4, image_variant="cuda")
    assert (last(paths.run).gpus, last(paths.run).recipe.image) == (4, "cuda")


def test_a_name_of_no_run_is_nothing_to_run(slurm: Slurm, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        submit("--run=thine")
    told = refused.value.finding
    assert (told.problem, told.found, told.fix) == (
        "there is nothing to run", f"no run {tmp_path}/runs/thine", f"dray runs --runs {tmp_path}/runs",
    )  # fmt: skip


def test_a_remote_wants_to_know_what_to_bring(slurm: Slurm) -> None:
    with pytest.raises(ConfigError, match="there is nothing to run"):
        submit("--on", "lumi", "--run=mine")


def test_a_run_that_others_may_write_is_not_taken(slurm: Slurm, tmp_path: Path) -> None:
    ran(tmp_path).folder.chmod(0o777)
    with pytest.raises(ConfigError, match="the run belongs to another user, or others may write into it"):
        submit("--run=mine")


@pytest.mark.slow
@pytest.mark.seconds
@pytest.mark.torch
def test_a_run_of_this_machine(tmp_path: Path) -> None:
    def dray(*words: str) -> list[str]:
        argv = [sys.executable, "-m", "dray", "run", *words]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
        return (done.stderr + done.stdout).splitlines()

    words = ("nodes=2", "launcher=python", "preflight.when=never", "env.SAYS=once", "--", "sh", "-c", 'echo "$SAYS"')
    assert "once" in dray("--run=mine", *words)
    again = dray("--run=mine", "env.SAYS=twice")
    assert again[0] == "resumes mine by the plan of attempt 1: sh -c 'echo \"$SAYS\"'; with env.SAYS=twice"
    assert "twice" in again
    assert (tmp_path / "runs" / "mine" / "attempt-2" / "result.json").exists()


class TestBatchScript:
    """sbatch slurm/multinode.sh --run=NAME."""

    @pytest.fixture
    def job(self, tmp_path: Path) -> Job:
        return Job(tmp_path)

    def begun(self, job: Job) -> None:
        (job.home / "train.py").touch()
        first = job.plan(
            "--run=mine", "image=cuda", "launcher=python", "--", "train.py", "--lr", "1", SLURM_GPUS_ON_NODE="2"
        )
        assert first.returncode == 0, first.stderr

    def plan(self, job: Job, number: int) -> dict[str, object]:
        found = json.loads((job.runs / "mine" / f"attempt-{number}" / "plan.json").read_text())
        return found["recipe"] | {"image": found["image"], "command": found["recipe"]["command"]["argv"]}

    @pytest.mark.seconds
    def test_the_next_attempt(self, job: Job) -> None:
        self.begun(job)
        ended = job.plan("--run=mine", SLURM_GPUS_ON_NODE="2")
        assert ended.returncode == 0, ended.stderr
        second = self.plan(job, 2)
        assert second == self.plan(job, 1)
        assert (second["command"], second["launcher"]) == (["train.py", "--lr", "1"], "python")
        resumes = [line for line in ended.stderr.splitlines() if line.startswith("resumes")]
        assert resumes == ["resumes mine by the plan of attempt 1: train.py --lr 1"]

    @pytest.mark.seconds
    def test_an_image_of_the_user_s(self, job: Job, tmp_path: Path) -> None:
        mine = tmp_path / "my images" / "i.sif"
        mine.parent.mkdir()
        (job.home / "build" / "dray-cuda.sif").rename(mine)
        (job.home / "build" / "dray-cuda.sif.d").rename(f"{mine}.d")
        (job.home / "train.py").touch()
        words = ("image=cuda", "--", "train.py")
        assert job.plan(f"--image={mine}", f"--run={job.runs}/mine", *words, SLURM_GPUS_ON_NODE="2").returncode == 0
        ended = job.plan(f"--run={job.runs}/mine", SLURM_GPUS_ON_NODE="2")
        assert ended.returncode == 0, ended.stderr
        assert f"image {mine}" in ended.stdout.splitlines()

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ((), ["there is nothing to run"]),
            (("image=cpu",), ["there is nothing to run"]),
            (("--run=thine",), ["there is nothing to run"]),
            (
                ("image=cpu", "light2.py", "--lr", "1"),
                [
                    "there is nothing to run: a program stands in the place of a setting",
                    "  wanted: [key=value ...] -- COMMAND ...", "  found:  light2.py",
                    "  fix:    put -- before it: sbatch slurm/multinode.sh image=cpu -- light2.py --lr 1",
                ],
            ),
        ],
    )  # fmt: skip
    def test_nothing_to_run(self, job: Job, words: tuple[str, ...], told: list[str]) -> None:
        ended = job.plan(*words)
        assert ended.returncode == 78
        lines = [f"dray: {told[0]}", *(line.format(runs=job.runs) for line in told[1:])]
        assert ended.stderr.splitlines()[: len(lines)] == lines
