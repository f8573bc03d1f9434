"""Which job goes back into the queue, by `dray finish` on real run folders."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from dray.contract import files
from dray.facts import Facts
from dray.runs import slurm
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.result import Result, summary
from dray.runs.status import Stop
from dray.runs.store import RunPaths

FACTS = Facts(scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif")
LIMIT = Stop("the time limit", "2026-11-24T05:00:00Z")
UNFIT = {
    "time": 1.0,
    "node": "n2",
    "rank": None,
    "code": 69,
    "why": "n2 has no /dev/hsn",
    "log": None,
    "last_lines": [],
}
LOST = {**UNFIT, "code": 75, "why": "node 1 (n2) is gone", "lost": True}
COMMAND = "command"


class Run:
    """One run folder, attempt after attempt."""

    def __init__(self, root: Path, runs: Path, *words: str) -> None:
        self.root, self.runs, self.words = root, runs, words
        self.name: str | None = None
        self.facts = FACTS
        self.node_log = ""

    def attempt(
        self, *, code: int = 75, stopped: Stop | None = None, saved: int | None = None, first: int = 0,
        batch: bool = True, record: dict[str, object] | None = None, failing: str = "",
    ) -> tuple[Result, RunPaths]:  # fmt: skip
        """One more, and how it ended."""
        if self.words[:1] == (COMMAND,):
            recipe = read_recipe(None, self.words[1:], ["true"])
        else:
            recipe = read_recipe(self.root / "recipes" / "smoke-cpu.toml", self.words)
        _, paths = write(recipe, self.facts, runs=self.runs, run=self.name)
        self.name = paths.run.name
        if saved is not None:
            (paths.checkpoints / f"step-{saved}").mkdir(exist_ok=True)
        events = [{"event": "start", "time": 100.0, "first_step": first, "steps": 9000}]
        events += [
            {"event": "step", "time": 100.0 + step, "step": step, "loss": 1.0} for step in range(first, first + 60, 10)
        ]
        paths.metrics.write_text("".join(f"{json.dumps(event)}\n" for event in events))
        paths.node_log(0).write_text(self.node_log)
        if failing:
            paths.failing_nodes.write_text(failing)
        if record:
            (paths.failures / "node-1.json").write_text(json.dumps(record))
        return finish(paths, code=code, stopped=stopped, batch=batch), paths


def asked(paths: RunPaths) -> str | None:
    return paths.next.read_text() if paths.next.exists() else None


def test_it_goes_on_while_steps_are_saved_and_as_often_as_the_recipe_says(root: Path, tmp_path: Path) -> None:
    run = Run(root, tmp_path, "max_requeues=2")
    first, paths = run.attempt(stopped=LIMIT, saved=20)
    assert (asked(paths), first.next and first.next.why) == ("requeue \n", "1 of 2")
    assert "requeue: 1 of 2" in summary(first, paths).splitlines()
    second, paths = run.attempt(stopped=LIMIT, saved=40, first=20)
    assert (asked(paths), second.next and second.next.why) == ("requeue \n", "2 of 2")
    third, paths = run.attempt(stopped=LIMIT, saved=60, first=40)
    assert (asked(paths), third.next and third.next.requeue) == (None, False)
    assert "requeue: no; max_requeues = 2 is used up" in summary(third, paths)
    assert [(one.attempt, one.status, one.why, one.requeued) for one in third.history] == [
        (1, "stopped", "the time limit", True),
        (2, "stopped", "the time limit", True),
    ]
    assert Result.model_validate_json(files.read(paths.result)) == third


def test_it_goes_on_though_its_summary_for_lists_cannot_be_made(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dray.runs.finish.write_summary", Mock(side_effect=OSError("a stale file handle")))
    result, paths = Run(root, tmp_path, "max_requeues=2").attempt(stopped=LIMIT, saved=20)
    assert (asked(paths), result.status, capsys.readouterr().err) == ("requeue \n", "stopped", "")


def test_an_attempt_that_saved_nothing_is_the_last(root: Path, tmp_path: Path) -> None:
    run = Run(root, tmp_path, "max_requeues=9")
    assert asked(run.attempt(stopped=LIMIT, saved=20)[1])
    result, paths = run.attempt(stopped=LIMIT, first=20)
    assert (asked(paths), result.saved_step) == (None, 20)
    assert "requeue: no; this attempt saved no checkpoint" in summary(result, paths)


@pytest.mark.parametrize(
    ("words", "code", "reason", "goes_on"),
    [
        ((), 75, "the time limit", True),
        ((), 143, "the time limit", True),
        ((), 75, "preemption", True),
        ((), 75, None, True),  # such as a node that was lost
        ((), 75, "scancel", False),
        ((), 75, "SIGUSR1", True),
        ((), 138, "SIGUSR1", False),
        ((), 75, "a request", False),
        ((), 143, "its deadline", False),
        ((), 78, None, False),
        ((), 1, None, False),
        ((COMMAND,), 75, "the time limit", True),
        ((COMMAND,), 75, None, True),
        ((COMMAND,), 143, "the time limit", False),
        ((COMMAND,), 1, None, False),
    ],
)
def test_what_ended_it_decides(
    root: Path, tmp_path: Path, words: tuple[str, ...], code: int, reason: str | None, *, goes_on: bool
) -> None:
    run = Run(root, tmp_path, *words, "max_requeues=1")
    stopped = Stop(reason, "2026-11-24T05:00:00Z") if reason else None
    result, paths = run.attempt(code=code, stopped=stopped, saved=20)
    assert bool(asked(paths)) == bool(result.next) == goes_on


def test_a_cause_of_which_another_attempt_may_know_nothing_goes_on(root: Path, tmp_path: Path) -> None:
    """A signal to all tasks ends what has mounted the image, and then the runner by SIGBUS."""
    run = Run(root, tmp_path, "max_requeues=1")
    run.node_log = './node.sh: line 58: 30883 Bus error               "$@"\n'
    result, paths = run.attempt(code=135, saved=20)
    assert (result.exit_code, result.cause and result.cause.name) == (75, "the image's mount went away")
    assert asked(paths) == "requeue \n"


@pytest.mark.parametrize(("record", "reason"), [(LOST, "a node failure"), (None, "scontrol requeue")])
def test_slurm_itself_puts_back_the_job_of_a_lost_node(
    root: Path, tmp_path: Path, record: dict[str, object] | None, reason: str
) -> None:
    stopped = Stop("scontrol requeue", "2026-11-24T05:00:00Z")
    result, paths = Run(root, tmp_path, "max_requeues=1").attempt(code=143, stopped=stopped, saved=20, record=record)
    assert (result.status, result.reason, asked(paths)) == ("stopped", reason, None)


def test_what_nobody_asked_for_is_not_done_but_said(root: Path, tmp_path: Path) -> None:
    result, paths = Run(root, tmp_path).attempt(stopped=LIMIT, saved=20)
    assert asked(paths) is None
    assert "requeue: no; set max_requeues=3 in the recipe, and dray requeues such a job" in summary(result, paths)


def test_outside_a_batch_job_there_is_no_queue(root: Path, tmp_path: Path) -> None:
    result, paths = Run(root, tmp_path, "max_requeues=3").attempt(stopped=LIMIT, saved=20, batch=False)
    assert (asked(paths), result.next) == (None, None)
    assert not slurm.is_batch(slurm.fields("JobId=17 BatchFlag=0\n"))
    assert slurm.is_batch(slurm.fields("at=1\nJobId=17 BatchFlag=1 Reboot=0\n"))


class TestUnfit:
    """A node that was found unfit is left out, whether steps were saved or not."""

    def test_once(self, root: Path, tmp_path: Path) -> None:
        result, paths = Run(root, tmp_path, "max_requeues=3").attempt(code=69, record=UNFIT)
        assert asked(paths) == "requeue n2\n"
        assert "requeue: 1 of 3, without n2" in summary(result, paths)

    @pytest.mark.parametrize("name", ["elsewhere", "", "n2; rm -rf", "-w"])
    def test_no_name_but_that_of_a_node(self, root: Path, tmp_path: Path, name: str) -> None:
        assert asked(Run(root, tmp_path, "max_requeues=3").attempt(code=69, record={**UNFIT, "node": name})[1]) is None


class TestSeveral:
    """Nodes that their own check has found unfit are left out at once."""

    def run(self, root: Path, tmp_path: Path, *words: str) -> Run:
        run = Run(root, tmp_path, "max_requeues=3", "batch.per_device=1", "batch.global_size=120", *words)
        run.facts = FACTS.model_copy(update={"nodelist": "n[1-6]", "nodes": 6})
        return run

    def test_all_of_them_in_one_line(self, root: Path, tmp_path: Path) -> None:
        result, paths = self.run(root, tmp_path).attempt(code=69, record=UNFIT, failing="n2,n5\n")
        assert (asked(paths), result.failing_nodes) == ("requeue n2 n5\n", ["n2", "n5"])
        said = summary(result, paths).splitlines()
        assert "failing nodes: n[2,5] (sbatch --exclude='n[2,5]')" in said
        assert "requeue: 1 of 3, without n2 n5" in said

    def test_spare_nodes_take_their_place(self, root: Path, tmp_path: Path) -> None:
        result, paths = self.run(root, tmp_path, "spares=2").attempt(code=69, record=UNFIT, failing="n2,n4\n")
        assert (result.hosts, asked(paths)) == (["n1", "n2", "n3", "n4"], "spare n2 n4\n")
        assert "spare nodes take over: n5 n6, without n2 n4" in summary(result, paths)

    def test_where_spare_nodes_do_not_suffice_the_job_goes_back(self, root: Path, tmp_path: Path) -> None:
        result, paths = self.run(root, tmp_path, "spares=1").attempt(code=69, record=UNFIT, failing="n2,n4\n")
        assert asked(paths) == "requeue n2 n4\n"
        assert result.next
        assert not result.next.spare

    def test_fewer_nodes_go_on_where_none_is_spare(self, root: Path, tmp_path: Path) -> None:
        words = ("spares=1", "min_nodes=2", "nodes=5", "batch.global_size=30")  # which three nodes divide, not four
        run = self.run(root, tmp_path, *words)
        result, paths = run.attempt(code=69, record=UNFIT, failing="n2,n4\n")
        assert (result.hosts, asked(paths)) == (["n1", "n2", "n3", "n4", "n5"], "spare n2 n4\n")
        assert "fewer nodes: 3 of 5 continue (min_nodes = 2), without n2 n4" in summary(result, paths)
        run.facts = run.facts.model_copy(update={"lost": ("n2", "n4")})
        result, paths = run.attempt(code=69, record={**UNFIT, "node": "n5", "why": "no driver"}, failing="n5\n")
        assert (result.hosts, asked(paths)) == (["n1", "n3", "n5"], "spare n5\n")
        assert "spare nodes take over: n6, without n5" in summary(result, paths)

    def test_too_few_nodes_go_back(self, root: Path, tmp_path: Path) -> None:
        result, paths = self.run(root, tmp_path, "min_nodes=5", "nodes=6").attempt(
            code=69, record=UNFIT, failing="n2,n4\n"
        )
        assert asked(paths) == "requeue n2 n4\n"
        assert result.next
        assert not result.next.spare

    def test_what_all_nodes_lack_is_no_node_s_fault(self, root: Path, tmp_path: Path) -> None:
        result, paths = self.run(root, tmp_path).attempt(code=69, record=UNFIT, failing="n1,n2,n3,n4,n5,n6\n")
        assert (asked(paths), result.next, len(result.failing_nodes)) == (None, None, 6)

    @pytest.mark.parametrize("content", [b"", b"n2;touch bad,-w,n9\n", b"\xff\x00" * 99, b"n2 n3", b"," * 5000])
    def test_no_name_but_those_of_the_plan(self, root: Path, tmp_path: Path, content: bytes) -> None:
        run = self.run(root, tmp_path)
        _, paths = run.attempt(code=69, record=UNFIT)
        paths.failing_nodes.write_bytes(content)
        result = finish(paths, code=69, batch=True)
        assert (result.failing_nodes, asked(paths)) == ([], "requeue n2\n")


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 99999, None])
def test_an_attempt_without_a_result_is_still_told(root: Path, tmp_path: Path, content: bytes | None) -> None:
    run = Run(root, tmp_path, "max_requeues=1")
    _, paths = run.attempt(stopped=LIMIT, saved=20)
    if content is None:
        paths.result.unlink()
    else:
        paths.result.write_bytes(content)
    result, _ = run.attempt(stopped=LIMIT, saved=40, first=20)
    assert [(one.attempt, one.status, one.why) for one in result.history] == [(1, "unknown", "it left no result")]


# As Slurm 24.11 prints it.
SHOWN = """JobId=17 JobName=my run
   UserId=dray(1000) GroupId=dray(1000) MCS_label=N/A
   Priority=1 Nice=0 Account=proj-1 QOS=normal
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:10 TimeLimit=1-02:00:00 TimeMin=N/A
   Partition=standard-g AllocNode:Sid=login:123
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-2]
   NumNodes=2 NumCPUs=16 NumTasks=2 CPUs/Task=7 ReqB:S:C:T=0:0:*:*
   MinCPUsNode=7 MinMemoryNode=0 MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   Reservation=(null)
   OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null)
   Command=/home/me/dray/slurm/multinode.sh
   WorkDir=/home/me/my work
   StdErr=/home/me/my work/dray-17.out
   StdIn=/dev/null
   StdOut=/home/me/my work/dray-17.out
   MailUser=me@example.org MailType=END,FAIL
   TresPerNode=gres/gpu:a100:4
"""


def options(root: Path, folder: Path, shown: str, *words: str, oneliner: bool = True, **record: object) -> list[str]:
    """Of sbatch, for a job like this one, which the batch script submits where Slurm does not put this one back."""
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", ["max_requeues=1", "grace_s=600", *words])
    _, paths = write(recipe, FACTS, runs=folder)
    if record:
        (paths.failures / "node-1.json").write_text(json.dumps({**UNFIT, **record}))
    else:
        (paths.checkpoints / "step-20").mkdir(exist_ok=True)
    known = " ".join(shown.split("\n   ")) if oneliner else shown
    finish(
        paths, code=69 if record else 75, batch=True, known=f"signal=USR1 at=5\nBatchFlag=1\n{known}first_of_job=1\n"
    )
    return paths.next.read_text().splitlines()[1:]


OPTIONS = [
    *("--job-name=my run", "--account=proj-1", "--qos=normal", "--partition=standard-g", "--time=1-02:00:00"),
    *("--cpus-per-task=7", "--gres=gpu:a100:4", "--mail-user=me@example.org", "--mail-type=END,FAIL"),
    *("--chdir=/home/me/my work", "--output=/home/me/my work/dray-17.out", "--open-mode=append"),
]


@pytest.mark.parametrize("oneliner", [True, False])
def test_a_job_that_follows_has_the_same_options(root: Path, tmp_path: Path, *, oneliner: bool) -> None:
    assert options(root, tmp_path, SHOWN, oneliner=oneliner) == [*OPTIONS, "--signal=B:USR1@600"]


def test_it_takes_over_memory_exclusive_nodes_and_those_left_out(root: Path, tmp_path: Path) -> None:
    shown = SHOWN.replace("MinMemoryNode=0", "MinMemoryNode=480G").replace("OverSubscribe=OK", "OverSubscribe=NO")
    shown = shown.replace("ExcNodeList=(null)", "ExcNodeList=n7")
    given = options(root, tmp_path, shown, "nodes=2", "min_nodes=2", node="n2")
    assert {"--mem=480G", "--exclude=n7,n2", "--exclusive", "--no-kill"} <= {*given}


def test_it_is_no_task_of_an_array(root: Path, tmp_path: Path) -> None:
    shown = SHOWN.replace("JobId=17", "JobId=19 ArrayJobId=17 ArrayTaskId=2").replace("dray-17.out", "job-%A_%a.log")
    assert "--output=/home/me/my work/job-17_2.log" in options(root, tmp_path, shown)


def test_where_slurm_does_not_answer_there_are_none(root: Path, tmp_path: Path) -> None:
    assert options(root, tmp_path, "") == []
