"""`dray study scale` and `sweep` with Slurm: what sbatch gets, what a task of the array makes of it, and the table."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from dray.cli import study as studies
from dray.contract.findings import ConfigError, DrayError
from dray.runs import replay, slurm, study, submit
from helpers import PYTHON, ROOT
from slurms import Slurm

Capture = pytest.CaptureFixture[str]
RECIPE = ROOT / "recipes" / "smoke-cpu.toml"
SBATCH = """#!/bin/bash
set -e
calls=({here}/call-*)
[[ -e "${{calls[0]}}" ]] && number=$((${{#calls[@]}} + 1)) || number=1
printf '%s\\0' "$@" >{here}/call-$number
((number != $(<{here}/refuses))) || {{ echo "sbatch: error: Invalid account" >&2; exit 1; }}
echo "12 nodes are down today"
[[ -e {here}/silent ]] || echo "$((41 + number));local"
"""


class Queue:
    """What sbatch got, call by call; it answers 42, 43, ... or refuses one."""

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        self.folder, self.slurm, self.runs = folder, slurm, folder / "my runs"
        (slurm.folder / "bin" / "sbatch").write_text(SBATCH.format(here=shlex.quote(str(folder))))
        self.refuses(0)

    def refuses(self, number: int) -> None:
        (self.folder / "refuses").write_text(str(number))

    @property
    def calls(self) -> list[list[str]]:
        return [path.read_text().split("\0")[:-1] for path in sorted(self.folder.glob("call-*"))]

    @property
    def study(self) -> Path:
        (path,) = self.runs.glob("*/study.json")
        return path.parent


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue(tmp_path, Slurm(tmp_path, monkeypatch))
    (tmp_path / "i.sif").write_bytes(b"hsqs")
    for name in ("DRAY_SITE", "SBATCH_ACCOUNT", "SLURM_JOB_ID", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRAY_HOME", str(ROOT))
    monkeypatch.setenv("DRAY_IMAGE", str(tmp_path / "i.sif"))
    monkeypatch.setattr(study, "new_id", lambda name: f"20-{name}")
    return made


def sweep(queue: Queue, *words: str, **options: object) -> int:
    return studies.sweep(RECIPE, [*words], runs=queue.runs, **options)  # type: ignore[arg-type]


def scale(queue: Queue, ranks: str, **options: object) -> int:
    return studies.scale(RECIPE, ranks, ["train.steps=40"], runs=queue.runs, **options)  # type: ignore[arg-type]


def as_a_task(argv: list[str], task: int) -> list[str]:
    """What slurm/job.sh takes the words behind the script for, in this task of the array."""
    script = """set -euo pipefail; source "$DRAY_HOME/slurm/job.sh"; job::task "$@"; printf '%s\\0' "${given[@]}" """
    env = {**PYTHON, "DRAY_HOME": str(ROOT), "SLURM_ARRAY_TASK_ID": str(task)}
    words = ["bash", "-c", script, "job", *argv]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


OPTIONS = ["--job-name=smoke-cpu", "--nodes=2", "--ntasks-per-node=1"]


@pytest.mark.parametrize(
    ("printed", "job", "cluster"),
    [
        ("42\n", 42, ""), ("7 days left\n42;local\n\n", 42, "local"), ("42\nsee https://site.example\n", 42, ""),
        ("7\r\n42\r\n", 42, ""), ("Submitted batch job 42\n", 42, ""),
    ],
)  # fmt: skip
def test_a_wrapper_of_the_site_may_print_more(printed: str, job: int, cluster: str) -> None:
    found = slurm.sbatch(["printf", printed])
    assert (found.job, found.cluster, found.argv) == (job, cluster, ["printf", printed])


@pytest.mark.parametrize("printed", ["", "12 nodes are down\n", "job 42\n"])
def test_an_sbatch_that_prints_no_number(printed: str) -> None:
    with pytest.raises(DrayError, match="sbatch printed no job number"):
        slurm.sbatch(["printf", printed])


def test_a_sweep_is_one_array(queue: Queue, tmp_path: Path, capsys: Capture) -> None:
    values = ("train.lr=1e-3,4e-3", 'env.X="a b","$(id)"', "train.steps=40", "checkpoint.folder=/c/")
    assert sweep(queue, *values, sbatch=["--time=10", "--qos=a b=c"]) == 0
    folder = queue.runs / "20-sweep-smoke-cpu"
    script = f"{ROOT}/slurm/multinode.sh"
    (argv,) = queue.calls
    assert argv == [
        "--parsable", f"--output={folder}-%a/job-%A_%a.log", "--array=1,2,3,4", *OPTIONS, "--time=10", "--qos=a b=c",
        script, f"--tasks={folder}/tasks", f"--image={tmp_path}/i.sif", "--site=", str(RECIPE), "train.steps=40",
        "checkpoint.folder=/c/",
    ]  # fmt: skip
    assert (folder / "tasks").read_text() == (
        f'{folder.name}-1\ttrain.lr=1e-3\tenv.X="a b"\tcheckpoint.folder=/c/{folder.name}-1\n'
        f'{folder.name}-2\ttrain.lr=1e-3\tenv.X="$(id)"\tcheckpoint.folder=/c/{folder.name}-2\n'
        f'{folder.name}-3\ttrain.lr=4e-3\tenv.X="a b"\tcheckpoint.folder=/c/{folder.name}-3\n'
        f'{folder.name}-4\ttrain.lr=4e-3\tenv.X="$(id)"\tcheckpoint.folder=/c/{folder.name}-4\n'
    )
    assert stat.S_IMODE((folder / "tasks").stat().st_mode) == 0o600
    for task in (1, 4):
        run = queue.runs / f"{folder.name}-{task}"
        given = as_a_task(argv[argv.index(script) + 1 :], task)
        own = (folder / "tasks").read_text().splitlines()[task - 1].split("\t")[1:]
        assert given == [
            f"--run={run}", f"--image={tmp_path}/i.sif", "--site=", str(RECIPE), "train.steps=40",
            "checkpoint.folder=/c/", *own,
        ]  # fmt: skip
        queued = json.loads((run / "job.json").read_text())
        assert (queued["job"], queued["task"], queued["cluster"], queued["argv"]) == (
            42, task, "local", ["sbatch", *argv]
        )  # fmt: skip
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
    kept = ("--job-name=smoke-cpu", "--ntasks-per-node=1", "--time=10", "--qos=a b=c")
    assert replay.job_options(run) == replay.JobOptions(kept)
    members = study.load(folder).members
    assert [(one.job_id, one.run) for one in members] == [
        (f"42_{number}", f"{folder.name}-{number}") for number in range(1, 5)
    ]
    out = capsys.readouterr().out
    assert out.startswith('job 42_1: train.lr=1e-3 env.X="a b"\njob 42_2: train.lr=1e-3 env.X="$(id)"\n')
    assert f"\nagain: dray study show '{folder}'\n" in out


def test_ranks_of_one_node_are_tasks_and_other_nodes_are_a_job(queue: Queue, tmp_path: Path, capsys: Capture) -> None:
    assert scale(queue, "1,2,4", per_node=2) == 0
    folder = queue.runs / "20-scale-smoke-cpu"
    decided = [f"--image={tmp_path}/i.sif", "--site=", str(RECIPE), "train.steps=40"]
    one_node = ["--job-name=smoke-cpu", "--nodes=1", "--ntasks-per-node=1"]
    assert queue.calls == [
        ["--parsable", f"--output={folder}-%a/job-%A_%a.log", "--array=1,2", *one_node,
         f"{ROOT}/slurm/singlenode.sh", f"--tasks={folder}/tasks", *decided],
        ["--parsable", f"--output={folder}-3/job-%j.log", *OPTIONS,
         f"{ROOT}/slurm/multinode.sh", f"--run={folder}-3", *decided, "ranks_per_node=2"],
    ]  # fmt: skip
    assert (folder / "tasks").read_text() == "".join(
        f"{folder.name}-{number}\tranks_per_node={ranks}\n" for number, ranks in ((1, 1), (2, 2), (3, 2))
    )
    assert [one.job_id for one in study.load(folder).members] == ["42_1", "42_2", "43"]
    assert json.loads((queue.runs / f"{folder.name}-3" / "job.json").read_text())["task"] is None
    out = capsys.readouterr().out
    assert out.splitlines()[:3] == ["job 42_1: 1 rank", "job 42_2: 2 ranks", "job 43: 4 ranks"]


def test_tasks_of_an_array_need_not_follow_one_another(queue: Queue) -> None:
    assert sweep(queue, "train.lr=1e-3,2e-3,4e-3", "nodes=1,2") == 0
    found = [(word, argv[-1]) for argv in queue.calls for word in argv if word.startswith("--array")]
    assert found == [("--array=1,3,5", str(RECIPE)), ("--array=2,4,6", str(RECIPE))]


@pytest.mark.parametrize(("largest", "calls"), [("0", 2), ("2", 2), ("3", 1), ("(null)", 1)])
def test_where_a_cluster_takes_no_such_array_each_is_a_job(queue: Queue, largest: str, calls: int) -> None:
    """MaxArraySize is above the largest number of a task; the default allows 1000."""
    (queue.slurm.folder / "scontrol").write_text(f"MaxArraySize            = {largest}\n")
    assert sweep(queue, "train.lr=1e-3,4e-3") == 0
    runs = [queue.runs / f"{queue.study.name}-{number}" for number in (1, 2)]
    assert [[word for word in argv if word.startswith(("--run=", "--tasks="))] for argv in queue.calls] == (
        [[f"--run={run}"] for run in runs] if calls == 2 else [[f"--tasks={queue.study}/tasks"]]
    )
    assert [member.job_id for member in study.load(queue.study).members] == (
        ["42", "43"] if calls == 2 else ["42_1", "42_2"]
    )  # fmt: skip


def test_where_sbatch_refuses_the_first_nothing_is_left(queue: Queue) -> None:
    queue.refuses(1)
    with pytest.raises(DrayError, match="sbatch"):
        studies.sweep(RECIPE, ["train.lr=1e-3,4e-3"], runs=queue.runs)
    assert list(queue.runs.iterdir()) == []


@pytest.mark.parametrize("says", ["Invalid partition name specified", "Access/permission denied", ""])
@pytest.mark.parametrize(
    ("variables", "before"),
    [
        ({}, ["sbatch"]),
        ({"SBATCH_QOS": "a b", "SBATCH_ACCOUNT": "p1"}, ["env", "SBATCH_ACCOUNT=p1", "SBATCH_QOS=a b", "sbatch"]),
    ],
)
def test_a_refusal_shows_the_whole_command_to_type_again(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, says: str, variables: dict[str, str], before: list[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("SBATCH_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = f"echo 'sbatch: error: {says}' >&2; exit 1" if says else "exit 0"
    (queue.slurm.folder / "bin" / "sbatch").write_text(f"#!/bin/bash\n{code}\n")
    argv = ["sbatch", "--partition=g p", "multinode.sh", "--run=it's", "--", "train.py", "-p", "other"]
    with pytest.raises(DrayError) as refused:
        submit.submit(argv, queue.runs / "mine", "none", queue.folder)
    assert shlex.split(refused.value.finding.where) == [*before, *argv[1:]]
    if says.startswith("Invalid"):
        assert refused.value.finding.found.startswith("--partition=g\n")


def test_what_is_wrong_before_sbatch_keeps_its_own_place(queue: Queue) -> None:
    (queue.folder / "file").touch()
    with pytest.raises(ConfigError, match="the run folder cannot be created") as refused:
        submit.submit(["sbatch", "multinode.sh"], queue.folder / "file" / "mine", "none", queue.folder)
    assert refused.value.finding.where == str(queue.folder / "file")


def test_a_job_that_has_begun_keeps_its_folder(queue: Queue) -> None:
    """Such as that of a wrapper which waits for the job's end, and ends with its code."""
    run = queue.runs / "mine"
    (queue.slurm.folder / "bin" / "sbatch").write_text(f"#!/bin/bash\nmkdir '{run}/attempt-1'\nexit 3\n")
    with pytest.raises(DrayError, match="sbatch failed with exit code 3"):
        submit.submit(["sbatch", "multinode.sh"], run, "none", queue.folder)
    assert (run / "attempt-1").is_dir()


def test_where_sbatch_prints_no_number_all_stays(queue: Queue) -> None:
    """The tasks may be in the queue, and they read the file of tasks."""
    (queue.folder / "silent").touch()
    with pytest.raises(DrayError, match="sbatch printed no job number"):
        studies.sweep(RECIPE, ["train.lr=1e-3,4e-3"], runs=queue.runs)
    assert len((queue.study / "tasks").read_text().splitlines()) == 2
    assert [(queue.runs / one.run).is_dir() for one in study.load(queue.study).members] == [True, True]


def test_where_it_refuses_the_second_the_first_is_shown_later(queue: Queue, capsys: Capture) -> None:
    queue.refuses(2)
    with pytest.raises(DrayError, match="sbatch"):
        studies.scale(RECIPE, "1,2,4", per_node=2, runs=queue.runs)
    assert [one.job_id for one in study.load(queue.study).members] == ["42_1", "42_2", ""]
    assert sorted(path.name for path in queue.runs.glob("[!.]*")) == [
        queue.study.name + end for end in ("", "-1", "-2")
    ]
    out = capsys.readouterr().out
    assert out == f"job 42_1: 1 rank\njob 42_2: 2 ranks\n\nagain: dray study show '{queue.study}'\n"


def test_one_that_is_refused_leaves_nothing_of_the_others(queue: Queue) -> None:
    """All are planned before one is queued."""
    with pytest.raises(ConfigError, match="global batch 16 is not divisible by 6 ranks"):
        studies.sweep(RECIPE, ["ranks_per_node=2,3"], runs=queue.runs)
    with pytest.raises(ConfigError, match="a value has a control character"):
        studies.sweep(RECIPE, ["env.X=a,b\tc"], runs=queue.runs)
    assert (queue.calls, queue.runs.exists()) == ([], False)


def test_the_table_knows_one_that_waits_runs_and_is_cancelled(queue: Queue, capsys: Capture) -> None:
    sweep(queue, "train.lr=1e-3,2e-3,4e-3")
    for number in (1, 2, 3):
        record = queue.runs / f"{queue.study.name}-{number}" / "job.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"time": 1795570000.0, "cluster": ""}))
    queue.slurm.lists((43, "42_1", "RUNNING"), (42, "42_2", "PENDING"))
    capsys.readouterr()
    code = studies.show(str(queue.study), as_json=True)
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [(row["job_id"], row["state"]) for row in rows] == [
        ("42_1", "running"), ("42_2", "queued"), ("42_3", "lost"),
    ]  # fmt: skip
    assert code == 1


@pytest.mark.hostile("arrays")
@pytest.mark.parametrize(
    "option", ["--array=1-3", "-a1-3", "--arr=2", "--nodes=2", "-N2", "--gres=gpu:2", "--time 8", "--wait", "-W"]
)
def test_options_of_sbatch_that_a_study_decides(queue: Queue, option: str) -> None:
    with pytest.raises(ConfigError) as refused:
        studies.sweep(RECIPE, ["train.lr=1e-3,4e-3"], runs=queue.runs, sbatch=[option])
    assert refused.value.exit_code == 78
    assert (queue.calls, queue.runs.exists()) == ([], False)


MEMBER = {"run": "r", "ranks": 1}


@pytest.mark.hostile("arrays")
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"version": 2}, "the study is damaged, or of another version of dray"),
        ({"version": None}, "the study is damaged, or of another version of dray"),
        ({"members": [MEMBER | {"run": "../x"}]}, "the study is damaged"),
        ({"members": [MEMBER | {"run": "a/b"}]}, "the study is damaged"),
        ({"members": [MEMBER | {"run": "a\n"}]}, "the study is damaged"),
        ({"members": [MEMBER | {"job_id": 3}]}, "the study is damaged"),
        ({"members": {"r": 1}}, "the study is damaged"),
    ],
)
def test_a_hostile_study(tmp_path: Path, content: dict[str, object], problem: str) -> None:
    path = tmp_path / "s" / "study.json"
    path.parent.mkdir()
    whole = {"version": 1, "kind": "strong", "recipe": "x", "members": []}
    path.write_text(json.dumps(whole | content))
    with pytest.raises(ConfigError, match=problem) as refused:
        study.load(path.parent)
    assert len(str(refused.value)) < 2000


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give a file away")
def test_another_user_s_study_is_shown(tmp_path: Path, capsys: Capture) -> None:
    """It names runs beside it, which are only read."""
    whole = {"version": 1, "kind": "sweep", "recipe": "x", "members": [MEMBER | {"job_id": "42_1"}]}
    (tmp_path / "study.json").write_text(json.dumps(whole))
    os.chown(tmp_path / "study.json", 4321, -1)
    assert studies.show(str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["1", "rank", "no", "run", "r"]


def test_a_study_s_escape_sequences_are_shown_as_text(tmp_path: Path, capsys: Capture) -> None:
    whole = {"version": 1, "kind": "sweep", "recipe": "x", "members": [MEMBER | {"settings": ["a=\x1b]0;x\x07\nb"]}]}
    (tmp_path / "study.json").write_text(json.dumps(whole))
    studies.show(str(tmp_path))
    assert "\x1b" not in capsys.readouterr().out
