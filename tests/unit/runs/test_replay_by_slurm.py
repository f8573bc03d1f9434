"""`dray replay` of a run that Slurm made: what sbatch gets, what is refused, and the comparison once it has ended."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from capsules import nodes, steps
from dray.cli import report as verb
from dray.contract.findings import ConfigError, DrayError
from dray.facts import Facts
from dray.runs import replay as replays
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.status import Watched
from dray.runs.store import RunPaths
from helpers import ROOT
from slurms import Slurm

Capture = pytest.CaptureFixture[str]
SCRIPT = f"{ROOT}/slurm/multinode.sh"
SBATCH = """#!/bin/bash
printf '%s\\0' "$@" >"{here}/argv"
printf '42;local\\nsee the news\\n'
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """sbatch writes down what it got."""
    made = Slurm(tmp_path, monkeypatch)
    (made.folder / "bin" / "sbatch").write_text(SBATCH.format(here=tmp_path))
    (tmp_path / "i.sif").write_bytes(b"hsqs")
    for name in ("DRAY_SITE", "SBATCH_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": ROOT, "IMAGE": tmp_path / "i.sif", "RUNS": tmp_path / "runs"}.items():
        monkeypatch.setenv(f"DRAY_{name}", str(value))
    monkeypatch.chdir(tmp_path)
    return made


def replay(*words: str | Path) -> int:
    app = typer.Typer()
    app.command()(verb.replay)
    return int(app([str(word) for word in words], standalone_mode=False) or 0)


def ran(
    runs: Path, *losses: float, run: str = "mine", words: tuple[str, ...] = (), code: int = 0, job: int = 17
) -> RunPaths:
    """A run of Slurm's on two nodes, without the file of its submission."""
    facts = Facts(
        scheduler="slurm", nodelist="n[1-2]", nodes=2, job=job, address="10.0.0.1", engine="apptainer",
        image=str(runs.parent / "i.sif"), image_variant="cpu",
    )  # fmt: skip
    paths = write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml", words), facts, runs=runs, run=run)[1]
    nodes(paths)
    steps(paths, *losses)
    with paths.metrics.open("a") as file:
        file.write('{"event": "end", "time": 9.0, "train_seconds": 1.0}\n')
    paths.final_model.mkdir(parents=True, exist_ok=True)
    (paths.final_model / "config.json").write_text("{}")
    finish(paths, code=code)
    return paths


def submitted(run: Path, *options: str, after: tuple[str, ...] = ("--site=",)) -> None:
    argv = ["sbatch", "--parsable", f"--output={run}/job-%j.log", *options, SCRIPT, f"--run={run}", *after, "x.toml"]
    (run / "job.json").write_text(json.dumps({"job": 17, "time": time.time(), "argv": argv}))


def replayed(home: Path) -> Path:
    (folder,) = (home / "runs").glob("*-smoke-cpu-*")
    return folder


def expected(home: Path, folder: Path, *options: str, site: str = "") -> list[str]:
    return [
        "--parsable", f"--output={folder}/job-%j.log", *options, SCRIPT, f"--run={folder}", f"--image={home}/i.sif",
        f"--site={site}", f"{folder}/replay.toml",
    ]  # fmt: skip


def given(home: Path) -> list[str]:
    return (home / "argv").read_text().split("\0")[:-1]


def test_the_same_job_again(slurm: Slurm, tmp_path: Path, capsys: Capture) -> None:
    """With the options that the run's job had, and its recipe in its own folder."""
    before = ran(tmp_path / "runs", 2.0, 1.5)
    submitted(
        before.run, "--job-name=mine", "--nodes=2", "--ntasks-per-node=1", "--account=p1", "--nodes=3", "-dafterok:3",
        "--time=08:00:00", "--no-kill",
    )  # fmt: skip
    assert replay("mine", "--sbatch=--time=10") == 0
    folder = replayed(tmp_path)
    kept = ("--job-name=mine", "--ntasks-per-node=1", "--account=p1", "--time=08:00:00")
    assert given(tmp_path) == expected(tmp_path, folder, *kept, "--nodes=2", "--time=10")
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "nothing differs from the run, as far as dray can tell before the start",
        shlex.join(["sbatch", *given(tmp_path)]),
        "job 42 is in the queue",
        f"run folder: {folder}",
        f"once it has ended: dray diff {before.run} {folder}",
    ]
    queued = json.loads((folder / "job.json").read_text())
    assert (queued["job"], queued["argv"]) == (42, ["sbatch", *given(tmp_path)])
    recipe = read_recipe(folder / "replay.toml")
    assert (recipe.nodes, recipe.ranks_per_node, recipe.spares, recipe.max_requeues) == (2, 2, 0, 0)


@pytest.mark.parametrize(
    ("losses", "ends", "code", "told"),
    [
        ((2.0, 1.5), 0, 0, "losses are identical to the last bit in 2 steps"),
        ((2.0, 1.25), 0, 1, "losses first differ at step 2: A 1.5, B 1.25"),
        ((2.0,), 69, 69, "the replay failed with exit code 69: "),
        ((), None, 1, "ended before its first attempt: see its output, job-42.log"),
    ],
)
@pytest.mark.parametrize("option", ["--wait", "-W"])
def test_one_that_waits_ends_with_the_code_of_the_job_or_of_the_comparison(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture,
    losses: tuple[float, ...], ends: int | None, code: int, told: str, option: str,
) -> None:  # fmt: skip
    ran(tmp_path / "runs", 2.0, 1.5)
    slurm.has(42, "PENDING")
    waits = 0

    def wait(_seconds: float) -> None:
        nonlocal waits
        waits += 1
        assert waits < 9
        if waits == 2:
            slurm.lists()
            folder = replayed(tmp_path)
            queued = json.loads((folder / "job.json").read_text())
            (folder / "job.json").write_text(json.dumps(queued | {"time": queued["time"] - 60}))
        if waits == (3 if ends is not None else 0):  # a disk that shows it late
            ran(tmp_path / "runs", *losses, run=replayed(tmp_path).name, code=ends or 0, job=42)

    monkeypatch.setattr(verb, "time", SimpleNamespace(sleep=wait))
    monkeypatch.setattr(Watched, "ask_s", -1.0)
    assert replay("mine", f"--sbatch={option}", "--sbatch=--time=10") == code
    assert (option in given(tmp_path), "--time=10" in given(tmp_path)) == (False, True)
    assert told in capsys.readouterr().out


def test_without_the_file_of_its_submission_the_site_decides(slurm: Slurm, tmp_path: Path, capsys: Capture) -> None:
    ran(tmp_path / "runs", 2.0)
    assert replay("mine") == 0
    options = ("--job-name=smoke-cpu", "--nodes=2", "--ntasks-per-node=1")
    assert given(tmp_path) == expected(tmp_path, replayed(tmp_path), *options)


def test_the_site_of_the_run_is_named_again(slurm: Slurm, tmp_path: Path) -> None:
    before, site = ran(tmp_path / "runs", 2.0), tmp_path / "mine.toml"
    site.write_text('name = "mine"\nabout = "x"\nsbatch = ["--partition=gpu"]\n')
    submitted(before.run, "--partition=big", after=(f"--site={site}", "--gpu-memory=80"))
    assert replay("mine") == 0
    argv = expected(tmp_path, folder := replayed(tmp_path), "--partition=big", "--nodes=2", site=str(site))
    assert given(tmp_path) == [*argv[:-1], "--gpu-memory=80", f"{folder}/replay.toml"]


def test_what_cannot_be_the_same_is_told_first(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    ran(tmp_path / "runs", 2.0)
    (tmp_path / "other.sif").write_bytes(b"hsqs")
    monkeypatch.setenv("DRAY_IMAGE", str(tmp_path / "other.sif"))
    assert replay("mine") == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "what cannot be the same, run -> replay:",
        f"  image: image: {tmp_path}/i.sif -> {tmp_path}/other.sif",
    ]


def test_a_job_that_slurm_refuses_leaves_no_folder(slurm: Slurm, tmp_path: Path) -> None:
    ran(tmp_path / "runs", 2.0)
    (slurm.folder / "bin" / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid account' >&2\nexit 1\n")
    with pytest.raises(DrayError, match="invalid account"):
        replay("mine")
    assert [one.name for one in (tmp_path / "runs").glob("[!.]*")] == ["mine"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--sbatch=--nodes=9",), "dray must plan with this option, so it cannot be given by --sbatch"),
        (("--sbatch=--time 9",), "an option of sbatch must be one word"),
        (("--recipe", "/nowhere/again.toml"), "cannot write the recipe"),
        (("--sbatch=--comment=a\nb",), "a value has a control character"),
    ],
)
def test_what_is_refused(slurm: Slurm, tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    ran(tmp_path / "runs", 2.0)
    with pytest.raises(ConfigError, match=told):
        replay("mine", *words)
    assert not (tmp_path / "argv").exists()
    assert [one.name for one in (tmp_path / "runs").glob("[!.]*")] == ["mine"]


@pytest.mark.parametrize(
    "content",
    [
        '{"job": 17, "time": 1, "argv": "sbatch"}',
        '{"job": 17, "time": 1, "argv": [7]}', '{"job": 0, "time": 1, "argv": []}',
        " " * (2 << 20),
    ],
    ids=lambda text: ascii(text[:60]),
)  # fmt: skip
def test_a_damaged_file_of_the_submission_has_no_options(tmp_path: Path, content: str) -> None:
    (tmp_path / "job.json").write_text(content)
    assert replays.job_options(tmp_path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
def test_options_that_others_may_have_written_are_not_taken(tmp_path: Path) -> None:
    submitted(tmp_path, "--error=/home/me/.bashrc")
    assert replays.job_options(tmp_path) == replays.JobOptions(("--error=/home/me/.bashrc",))
    (tmp_path / "job.json").chmod(0o666)
    assert replays.job_options(tmp_path) is None
    (tmp_path / "job.json").chmod(0o600)
    for path in (tmp_path / "job.json", tmp_path):
        os.chown(path, 65534, 65534)
        assert replays.job_options(tmp_path) is None
        os.chown(path, 0, 0)


def test_the_words_of_the_user_s_command_decide_nothing(tmp_path: Path) -> None:
    command = ("--site=a", "--gpu-memory=80", "--", "python", "t.py", "--site=b", "--gpu-memory=80G")
    submitted(tmp_path, "--nodes=1", after=command)
    assert replays.job_options(tmp_path) == replays.JobOptions((), "a", 80.0)


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        (("--dependency=afterok:3",), ()),
        (("-dafterok:3",), ()),
        (("--begin=now+1hour", "-Ap1"), ("-Ap1",)),
        (("-A", "p1"), ("-A", "p1")),
        (("--depend=afterany:3", "--arr=1-3", "--time=9"), ("--time=9",)),  # sbatch takes the beginning of a name
        (("-N", "2", "--begin", "now+1hour", "-A", "p1"), ("-A", "p1")),
        (("--gres=gpu:4", "--gres=nvme:1"), ("--gres=nvme:1",)),
        (("--wait",), ()),
        (("--wait-all-nodes=1",), ("--wait-all-nodes=1",)),
        (("--array=1-9", "-D/x", "--nodelist=n1"), ("-D/x", "--nodelist=n1")),
        (("--signal=B:USR1@300", "--exclude=n3"), ("--signal=B:USR1@300", "--exclude=n3")),
    ],
)
def test_which_options_are_the_run_s_own(tmp_path: Path, option: tuple[str, ...], kept: tuple[str, ...]) -> None:
    submitted(tmp_path, *option)
    assert replays.job_options(tmp_path) == replays.JobOptions(kept)
