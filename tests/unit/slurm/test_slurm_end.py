"""slurm/end.sh with stand-ins for scontrol and sbatch: every word that Slurm would get."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dray.planning.schema import Plan
from dray.runs import finish
from helpers import ROOT, python

SHOWN = "JobId=17 JobName=my run JobState={state} Restarts=0 BatchFlag=1"
TOOL = """#!{python}
import json, os, sys
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
if words[1:3] == ["show", "job"]:
    print(os.environ["JOB"], end="")
    sys.exit()
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(words) + "\\n")
answer = json.loads(os.environ["ANSWERS"]).get(words[0] + " " + words[1], "")
print(answer.lstrip("!"), file=sys.stderr if answer.startswith("!") else sys.stdout)
sys.exit(answer.startswith("!"))
"""
SCRIPT = """
set -euo pipefail
image=/i.sif attempt="/home/me/my runs/r/attempt-1"
given=(recipes/x.toml "data.train=/my data/*.jsonl" -- python3 "my train.py")
source "$DRAY_HOME/slurm/job.sh"
lost=() stopped_by=""
end::decided
((${#lost[@]} == 0)) || echo "lost ${lost[*]}"
"""


class Slurm:
    """A folder with what dray finish decided, and Slurm's two commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        for name in ("scontrol", "sbatch"):
            (folder / name).write_text(TOOL.format(python=python()))
            (folder / name).chmod(0o755)

    def after(
        self, decided: str, *, answers: dict[str, str] | None = None, state: str = "RUNNING", **env: str
    ) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
        """What is printed, and what Slurm was asked."""
        (self.folder / "next").write_text(decided)
        self.calls.write_text("")
        env = {
            **{"PATH": f"{self.folder}:{os.environ['PATH']}", "DRAY_HOME": str(ROOT), "CALLS": str(self.calls)},
            **{"JOB": SHOWN.format(state=state), "ANSWERS": json.dumps(answers or {}), "SLURM_JOB_ID": "17"},
            **{"SLURM_JOB_NUM_NODES": "2"},
            **env,
        }
        argv = ["bash", "-c", SCRIPT]
        done = subprocess.run(argv, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
        return done, [json.loads(line) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def test_on_with_a_spare_node(slurm: Slurm) -> None:
    done, calls = slurm.after("spare n2\n")
    assert (done.stdout, calls) == ("lost n2\n", [])


def test_on_with_several(slurm: Slurm) -> None:
    done, calls = slurm.after("spare n2 n5\n")
    assert (done.stdout, calls) == ("lost n2 n5\n", [])


REFUSED = {"scontrol requeue": "!Job requeue disabled for job 17"}


def test_it_is_put_back(slurm: Slurm) -> None:
    done, calls = slurm.after("requeue \n")
    assert calls == [["scontrol", "requeue", "17"]]
    assert done.stdout == (
        "requeued: job 17 goes on in this run folder; Slurm starts it in two minutes at the earliest (BeginTime)\n"
    )


def test_without_nodes_that_are_unfit(slurm: Slurm) -> None:
    decided = "requeue n2 n5\n--exclude=n7,n9,n2,n5\n--account=x\n"
    _, calls = slurm.after(decided)
    assert calls == [["scontrol", "requeue", "17"], ["scontrol", "update", "job=17", "ExcNodeList=n7,n9,n2,n5"]]
    _, (_, follow) = slurm.after(decided, answers=REFUSED)
    assert "--exclude=n7,n9,n2,n5" in follow


@pytest.mark.parametrize(
    ("left_out", "excluded"), [("(null)", "n2,n5"), ("n[7-9],n11", "n[7-9],n11,n2,n5"), ("n2", "n2,n2,n5")]
)
@pytest.mark.parametrize("by_slurm", [False, True])
def test_without_nodes_that_are_unfit_where_slurm_answers_late(
    slurm: Slurm, left_out: str, excluded: str, *, by_slurm: bool
) -> None:
    """Dray finish has got no answer, and gives no options; the request to requeue may have had none either."""
    state = "PENDING" if by_slurm else "COMPLETING"
    shown = f"{SHOWN.format(state=state)}\n   ReqNodeList=(null) ExcNodeList={left_out}\n   NodeList=n2\n"
    answers = {"scontrol requeue": "!Connection timed out"} if by_slurm else {}
    done, calls = slurm.after("requeue n2 n5\n", answers=answers, JOB=shown)
    assert calls == [["scontrol", "requeue", "17"], ["scontrol", "update", "job=17", f"ExcNodeList={excluded}"]]
    assert done.stdout.startswith("requeued: ")


def test_nodes_that_the_user_has_left_out_stay_out_where_slurm_does_not_answer(slurm: Slurm) -> None:
    done, calls = slurm.after("requeue n2\n", JOB="")
    assert calls == [["scontrol", "requeue", "17"]]
    assert done.stdout.startswith("warning: ExcNodeList cannot be set: Slurm may give this job the same nodes again\n")


def test_a_task_of_an_array_puts_back_itself_alone(slurm: Slurm) -> None:
    _, calls = slurm.after("requeue\n", SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="3")
    assert calls == [["scontrol", "requeue", "17_3"]]


def test_what_follows_a_task_of_an_array_waits_for_that_task_alone(slurm: Slurm) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    _, (_, follow) = slurm.after(LIKE_THIS, answers={"scontrol requeue": "!Job requeue disabled"}, **array)
    assert follow[:4] == ["sbatch", "--parsable", "--dependency=afterany:17_3", "--nodes=2"]


def test_slurm_is_asked_how_a_task_of_an_array_ended(slurm: Slurm) -> None:
    """By the number of the array it would tell of all its tasks."""
    (slurm.folder / "scontrol").write_text('#!/bin/bash\necho "$@"\n')
    script = 'source "$DRAY_HOME/slurm/job.sh"; stopped_by="" lost=() began_at=5; end::job 1'
    env = {"PATH": f"{slurm.folder}:{os.environ['PATH']}", "DRAY_HOME": str(ROOT), "HOME": "/nowhere"}
    for array, asked in (({}, "17"), ({"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}, "17_3")):
        argv = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(
            argv, env={**env, "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", **array},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        shown, first, cost = done.stdout.splitlines()
        assert (shown, first) == (f"show job --oneliner {asked}", "first_of_job=1")
        assert re.fullmatch(r"begun_s=5 ended_s=[0-9.]+ allocated_nodes=2 allocated_gpus=0", cost)


def test_slurm_has_done_it_already(slurm: Slurm) -> None:
    done, calls = slurm.after("requeue\n", answers=REFUSED, state="PENDING")
    assert (len(calls), done.stdout) == (1, "requeued: by Slurm itself; job 17 goes on in this run folder\n")


OPTIONS = ["--job-name=my run", "--exclusive", "--chdir=/home/me/my work", "--signal=B:USR1@600"]
LIKE_THIS = "".join(f"{line}\n" for line in ("requeue ", *OPTIONS))
REST = [
    f"{ROOT}/slurm/multinode.sh", "--run=/home/me/my runs/r", "recipes/x.toml", "data.train=/my data/*.jsonl", "--",
    "python3", "my train.py",
]  # fmt: skip


def test_where_slurm_puts_nothing_back_another_job_follows(slurm: Slurm) -> None:
    done, (_, follow) = slurm.after(LIKE_THIS, answers={**REFUSED, "sbatch --parsable": "18;cluster"})
    assert follow == ["sbatch", "--parsable", "--dependency=afterany:17", "--nodes=2", *OPTIONS, *REST]
    assert done.stdout == (
        "not requeued: Job requeue disabled for job 17\n"
        "follow-on: job 18 goes on in this run folder once this one has ended\n"
    )


def test_a_site_s_sbatch_may_print_more(slurm: Slurm) -> None:
    answers = {**REFUSED, "sbatch --parsable": "sbatch: 5 credits are left\n18;cluster\nsbatch: have a nice day"}
    done, _ = slurm.after(LIKE_THIS, answers=answers)
    assert done.stdout.splitlines()[1:] == ["follow-on: job 18 goes on in this run folder once this one has ended"]


def test_where_a_node_may_not_submit_the_line_is_printed(slurm: Slurm) -> None:
    answers = {**REFUSED, "sbatch --parsable": "!sbatch: error: Access/permission denied"}
    done, (_, follow) = slurm.after(LIKE_THIS, answers=answers)
    assert done.returncode == 0
    line = done.stdout.splitlines()[-1]
    assert line.startswith("  fix:    type this on a login node: sbatch ")
    typed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line.partition('node: ')[2]}"], capture_output=True, text=True, check=True
    )
    assert typed.stdout.split("\0")[:-1] == follow


@pytest.mark.parametrize("decided", [""])
def test_nothing_is_asked_where_nothing_is_decided(slurm: Slurm, decided: str) -> None:
    done, calls = slurm.after(decided)
    assert (done.stdout, calls) == ("", [])


@pytest.mark.parametrize(
    "decided",
    [
        "cancel\n", "requeue $(touch bad)\n", "requeue -w\n", "requeue n2 n3,n4\n", "spare n2 -w\n", "x" * 5000,
        "requeue\n/tmp/evil.sh\n", "requeue\n-w\n", "requeue\n--wrap\t=x\n", "requeue\n--comment=a\x1b\n",
        "requeue\n--wrap=x\n", "requeue\n--exclude\n", "requeue\n--no-kill=x\n", "requeue\n--signal=KILL\n",
    ],
)  # fmt: skip
def test_the_image_s_word_is_not_trusted(slurm: Slurm, tmp_path: Path, decided: str) -> None:
    done, calls = slurm.after(decided)
    assert (done.returncode, calls, (tmp_path / "bad").exists()) == (78, [], False)


def test_all_options_of_dray_finish_reach_sbatch(slurm: Slurm) -> None:
    shown = "".join(f"{field}=value " for field in finish._SBATCH_OPTIONS.values())
    plan = SimpleNamespace(recipe=SimpleNamespace(replaces_nodes=True), grace_s=60)
    options = finish.requeue_options(f"{shown}OverSubscribe=NO", cast("Plan", plan), ["n2"])
    assert {option.partition("=")[0] for option in options} >= {f"--{name}" for name in finish._SBATCH_OPTIONS}
    _, (_, follow) = slurm.after("".join(f"{line}\n" for line in ("requeue n2", *options)), answers=REFUSED)
    assert follow[4 : 4 + len(options)] == options


def test_no_other_job_follows_where_slurm_does_not_answer(slurm: Slurm) -> None:
    """It may have put this one back all the same, and both would do the same work."""
    done, calls = slurm.after(LIKE_THIS, answers=REFUSED, JOB="")
    assert [call[:2] for call in calls] == [["scontrol", "requeue"]]
    assert slurm.after("requeue \n", answers=REFUSED)[0].stdout == done.stdout  # it did not when the nodes ended
    assert done.stdout == (
        "unknown whether job 17 was requeued, since Slurm does not answer; look with squeue --job=17\n"
    )


def test_a_follow_on_starts_where_this_one_did(slurm: Slurm, tmp_path: Path) -> None:
    answers = {**REFUSED, "sbatch --parsable": "!sbatch: error: Access/permission denied"}
    done, _ = slurm.after(LIKE_THIS, answers=answers, SLURM_SUBMIT_DIR=str(tmp_path))
    line = done.stdout.splitlines()[-1]
    assert line.startswith(f"  fix:    type this on a login node: cd {tmp_path} && sbatch ")
