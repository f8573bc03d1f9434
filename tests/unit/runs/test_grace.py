"""Whether a checkpoint fits into what Slurm leaves a job: before it is queued, and when it has ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from command import dray
from dray.config import sites
from dray.config.site import Site
from dray.contract.findings import ConfigError, Finding
from dray.facts import Facts, Files, parse, to_text
from dray.fitness import doctor
from dray.planning import grace as planned
from dray.planning import rules
from dray.planning.schema import Plan
from dray.runs import finish, prepare, status, submit
from dray.runs import slurm as slurm_module
from dray.runs.prepare import decide, read_recipe, write
from dray.runs.result import Result, summary
from dray.runs.status import Stop
from dray.runs.store import RunPaths
from helpers import ROOT

# As Slurm 24.11 prints it, in part.
CONFIG = """Configuration data as of 2026-11-24T22:00:00
AccountingStorageTRES   = cpu,mem,energy,node,billing,fs/disk,vmem,pages
ClusterName             = harbour
KillOnBadExit           = 0
KillWait                = 30 sec
MessageTimeout          = 10 sec
PreemptMode             = {mode}
PreemptParameters       = {parameters}
PreemptType             = {type}
PreemptExemptTime       = 00:00:00

Cgroup Support Configuration:
ConstrainCores          = yes

Slurmctld(primary) at n1 is UP
"""
PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default={default} QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime={grace} Hidden=NO "
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED "
    "NodeSets=ALL Nodes=n[1-2] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO "
    "OverTimeLimit=NONE PreemptMode={mode} State=UP TotalCPUs=8 TotalNodes=2 SelectTypeParameters=NONE "
    "JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=8,mem=2000M,node=2,billing=8"
)
PARTITIONS = "\n".join(
    [
        PARTITION.format(name="main", default="YES", grace=0, mode="REQUEUE"),
        PARTITION.format(name="long", default="NO", grace=300, mode="REQUEUE"),
        PARTITION.format(name="safe", default="NO", grace=0, mode="OFF"),
    ]
)


class Slurm:
    """Stand-ins for its commands, first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        self.answers(mode="REQUEUE", parameters="send_user_signal", type="preempt/partition_prio")
        self.tool("sbatch", "echo slurm 24.11.0")
        self.tool("sinfo", "echo 'main|2|4|(null)'; echo 'safe|2|4|(null)'")

    def tool(self, name: str, script: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / name).chmod(0o755)

    def answers(self, **config: str) -> None:
        for name, text in (("config", CONFIG.format(**config)), ("partition", PARTITIONS)):
            (self.folder / f"{name}.txt").write_text(text)
        self.tool("scontrol", f'exec cat "{self.folder}/$2.txt"')


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    found = Slurm(tmp_path)
    monkeypatch.setenv("PATH", f"{found.folder}:/bin:/usr/bin")
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    return found


class TestSlurm:
    """What it tells."""

    @pytest.mark.parametrize(
        ("names", "mode", "seconds"),
        [
            ([], "REQUEUE", 0),
            (["main"], "REQUEUE", 0),
            (["long"], "REQUEUE", 300),
            (["long", "main"], "REQUEUE", 0),
            (["safe"], "OFF", 0),
            (["none"], "", None),
        ],
    )
    def test_of_a_partition(self, slurm: Slurm, names: list[str], mode: str, seconds: int | None) -> None:
        found = slurm_module.preemption(slurm_module.conf(), names)
        assert (found["preempt_mode"], found.get("preempt_grace_s")) == (mode, seconds)
        assert (found["preempt_signal"], found["kill_wait_s"]) == (True, 30)
        assert slurm_module.cluster_name() == "harbour"

    @pytest.mark.parametrize("type_", ["(null)", "preempt/none"])
    def test_without_preemption(self, slurm: Slurm, type_: str) -> None:
        slurm.answers(mode="OFF", parameters="(null)", type=type_)
        assert slurm_module.preemption(slurm_module.conf()) == {"kill_wait_s": 30}

    @pytest.mark.parametrize(
        "script",
        ["exit 1", "exec cat /dev/null", "head -c 99999 /dev/urandom", "echo 'KillWait = sec'; echo 'PreemptType = x'",
         "echo 'KillWait                = 9999999999999 sec'"],
    )  # fmt: skip
    def test_rubbish(self, slurm: Slurm, script: str) -> None:
        slurm.tool("scontrol", script)
        found = slurm_module.preemption(slurm_module.conf())
        Facts(scheduler="slurm", nodelist="n1", nodes=1, engine="apptainer", image="/i.sif", **found)

    @pytest.mark.seconds
    def test_a_controller_that_does_not_answer(self, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slurm_module, "_QUICK_S", 0.3)
        slurm.tool("scontrol", "exec sleep 60")
        assert (slurm_module.conf(), slurm_module.preemption({}), slurm_module.cluster_name()) == ({}, {}, "")

    def test_without_slurm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        assert slurm_module.conf() == {}

    def test_doctor_shows_the_cluster(self, slurm: Slurm) -> None:
        assert next(doctor._slurm()).found == "slurm 24.11.0, cluster harbour, partitions main, safe"

    def test_facts_keep_it(self, slurm: Slurm) -> None:
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
        options = ["--sbatch-is-not-looked-at", "--partition=main", "-plong"]
        found, _ = submit.job_facts(recipe, None, 0, "", ranks=None, options=options, gpu_memory=None)
        assert (found.preempt_mode, found.preempt_grace_s, found.kill_wait_s, found.cluster) == (
            "REQUEUE", 300, 30, "harbour",
        )  # fmt: skip
        kept = found.model_copy(update={"options": ()})
        again = parse(to_text(kept), where="test")
        assert (again.preempt_signal, again.preempt_grace_s) == (True, 300)


def facts(*options: str, **more: object) -> Facts:
    given = {"scheduler": "slurm", "nodelist": "n1", "nodes": 1, "engine": "apptainer", "image": "/i.sif"}
    return Facts.model_validate({**given, "options": options, **more})


SITE = sites.find(sites.GENERIC)


class TestChosen:
    """Who decides the seconds, and what sbatch is told."""

    @pytest.mark.parametrize(
        ("recipe", "site", "options", "seconds", "why"),
        [
            ([], {}, [], 120, "the default --signal of the batch scripts"),
            ([], {"grace_s": 300}, [], 300, "grace_s of site generic"),
            (["grace_s=600"], {"grace_s": 300}, [], 600, "the recipe's grace_s"),
            (["grace_s=600"], {}, ["--signal=B:USR1@900"], 900, "--signal=B:USR1@900 of the command line"),
            (["grace_s=600"], {"sbatch": ("--signal=USR1@60",)}, [], 600, "the recipe's grace_s"),
            ([], {"sbatch": ("--signal=USR1@70",)}, [], 70, "--signal=USR1@70 of site generic"),
            ([], {}, ["--signal=10"], 60, "--signal=10 of the command line"),
            ([], {}, ["--signal=B:USR1@999999"], 120, "the default --signal of the batch scripts"),
        ],
    )
    def test_it(self, recipe: list[str], site: dict[str, object], options: list[str], seconds: int, why: str) -> None:
        made = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", recipe)
        found = planned.chosen(made, SITE.model_copy(update=site), facts(*options))
        assert (found.value, found.why) == (seconds, why)

    def test_submit_tells_sbatch(self) -> None:
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["grace_s=600"])
        site = SITE.model_copy(update={"grace_s": 300, "sbatch": ("--signal=B:USR1@7",)})
        assert submit.options(recipe, site, 0, None) == [
            "--job-name=smoke-cpu", "--nodes=2", "--ntasks-per-node=1", "--signal=B:USR1@7", "--signal=B:USR1@600",
        ]  # fmt: skip
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
        assert "--signal=B:USR1@300" in submit.options(recipe, site, 0, None)
        assert not any("signal" in option for option in submit.options(recipe, SITE, 0, None))

    @pytest.mark.parametrize("value", ["0", "-1", "70000", "1.5", '"x"', "true", "[120]", "nan", '"120"', "1e2"])
    def test_what_is_no_number_of_seconds(self, value: str) -> None:
        with pytest.raises(ConfigError):
            read_recipe(ROOT / "recipes" / "smoke-cpu.toml", [f"grace_s={value}"])


def found(
    *options: str, save: float | None = 70.0, recipe: tuple[str, ...] = (), earlier: bool = False, **more: object
) -> list[Finding]:
    made = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", recipe)
    files = Files(save_s=save, save_run="r1" if save else "", earlier=earlier)
    plan = Plan.model_construct(recipe=made)
    given = rules.Planned(plan, SITE, facts(*options, **more), files)
    return [*rules._grace(given), *rules._preemption(given)]


class TestBefore:
    """What the plan finds."""

    def test_shorter_than_twice_the_slowest(self) -> None:
        assert found() == [
            Finding(
                "the grace is shorter than twice the slowest checkpoint",
                wanted="140 s or more: a checkpoint of run r1 took 70.0 s",
                found="120 s before the time limit (the default --signal of the batch scripts)",
                fix="grace_s=140 with dray submit; with sbatch itself --signal=B:USR1@140",
            )
        ]
        assert found(save=60.0) == found(save=None) == found(recipe=("grace_s=140",)) == []
        assert found(scheduler="local") == []

    @pytest.mark.parametrize(
        ("option", "seconds"),
        [("--time=2", 120), ("--time=1:30", 90), ("--time=0:01:00", 60), ("-t1", 60), ("--time=0-0", 0),
         ("--time=0-0:1", 60), ("--time=0-0:0:40", 40), ("--time=08:00:00", None), ("--time=1-0", None),
         ("--time=UNLIMITED", None), ("--time=", None), ("--time=infinite", None)],
    )  # fmt: skip
    def test_not_shorter_than_the_job(self, option: str, seconds: int | None) -> None:
        seen = found(option, save=None)
        wanted = [f"less than {seconds} s, the time limit"] if seconds else []
        assert [one.wanted for one in seen] == wanted

    def test_preemption(self) -> None:
        left = {"preempt_mode": "REQUEUE", "preempt_grace_s": 20, "kill_wait_s": 30, "preempt_signal": True}
        first, second, third = found(**left)
        assert second == Finding(
            "a checkpoint takes longer than preemption allows",
            wanted="70.0 s, which a checkpoint of run r1 took",
            found="PreemptMode=REQUEUE, GraceTime 20 s, KillWait 30 s",
            fix="save often (checkpoint.every), or use a partition without preemption",
        )
        assert (third.problem, third.level) == ("scancel allows less time than a checkpoint takes", "note")
        assert found(save=20.0, **left) == []
        assert found(**{**left, "preempt_mode": "OFF"}) == [first, third]
        assert found(**{**left, "preempt_mode": "GANG,SUSPEND"}) == [first, third]
        assert found(save=None, earlier=True, **{**left, "preempt_signal": False}) == []
        (silent,) = found(save=None, **{**left, "preempt_signal": False})
        assert (silent.level, silent.problem) == (
            "note", "on this partition preemption does not send the signal that asks a run to save",
        )  # fmt: skip

    def test_by_an_earlier_run(self, tmp_path: Path) -> None:
        """The newest of the same recipe that tells; whatever else lies there."""
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
        for name, save in (
            ("20261101-000000-smoke-cpu-7", 300.0), ("20261102-000000-smoke-cpu-8", 90.0),
            ("20261103-000000-smoke-cpu-2-9", 500.0), ("20261104-000000-smoke-cpu-a1b2c3", None),
        ):  # fmt: skip
            folder = tmp_path / name / "attempt-1"
            folder.mkdir(parents=True)
            result = Result(run=name, status="done", exit_code=0, finished="x", world_size=1, hosts=[], save_s=save)
            (folder / "result.json").write_text(result.model_dump_json())
        for name, content in (("20261105-000000-smoke-cpu-10", b"{"), ("20261106-000000-smoke-cpu-11", b"[" * 99999)):
            (tmp_path / name / "attempt-1").mkdir(parents=True)
            (tmp_path / name / "attempt-1" / "result.json").write_bytes(content)
        (tmp_path / "20261107-000000-smoke-cpu-12").symlink_to("/nonexistent")
        os.mkfifo(tmp_path / "20261108-000000-smoke-cpu-13")
        for runs, name, slowest in (
            (tmp_path, recipe.name, (90.0, "20261102-000000-smoke-cpu-8")),
            (tmp_path, "smoke-cpu-2", (500.0, "20261103-000000-smoke-cpu-2-9")),
            (tmp_path / "none", recipe.name, None),
        ):
            assert prepare.slowest_checkpoint(runs, prepare.earlier_runs(runs, name)) == slowest
        made = decide(recipe, facts(), sites.Choice(SITE, "test"), RunPaths(tmp_path / "new"))
        assert [one.wanted for one in made.findings if "grace" in one.problem] == [
            "180 s or more: a checkpoint of run 20261102-000000-smoke-cpu-8 took 90.0 s"
        ]


JOB = Facts(scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif")


class TestAfter:
    """What result.json and the last lines say."""

    def ended(
        self,
        runs: Path,
        *words: str,
        code: int = 0,
        stopped: Stop | None = None,
        saves: tuple[object, ...] = (3.5, 80.0),
    ) -> tuple[Result, str]:
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", words)
        _, paths = write(recipe, JOB, runs=runs)
        (paths.checkpoints / "step-20").mkdir()
        events: list[dict[str, object]] = [{"event": "step", "time": 100.0, "step": 20, "loss": 1.0}]
        events += [
            {"event": "checkpoint", "time": 190.0, "checkpoint": 20, "saved": True, "seconds": seconds}
            for seconds in saves
        ]
        paths.metrics.write_text("".join(f"{json.dumps(event)}\n" for event in events))
        result = finish.finish(paths, code=code, stopped=stopped)
        return result, summary(result, paths)

    def test_the_slowest_checkpoint(self, tmp_path: Path) -> None:
        result, printed = self.ended(tmp_path, code=75, stopped=Stop("the time limit", "2026-11-24T05:00:00Z"))
        assert (result.save_s, result.warnings, "warning" in printed) == (80.0, [], False)

    @pytest.mark.parametrize("seconds", [None, "80", True, [], 1e999, float("nan")])
    def test_no_number(self, tmp_path: Path, seconds: object) -> None:
        result, _ = self.ended(tmp_path, saves=(2.0, seconds))
        assert result.save_s == 2.0

    @pytest.mark.parametrize(
        ("grace_s", "left", "reason"),
        [(120, 240, "the time limit"), (120, 241, "SIGUSR1"), (600, 700, "the time limit")],
    )
    def test_the_signal_is_the_time_limit_s(self, grace_s: int, left: int, reason: str) -> None:
        text = f"signal=USR1 at=1000 end={1000 + left}\nJobId=17 JobState=RUNNING Reason=None\n"
        seen = status.stop_of_job(text, now=0, grace=grace_s)
        assert seen.reason == reason

    @pytest.mark.seconds
    def test_dray_finish_knows_the_plan_s(self, tmp_path: Path) -> None:
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["grace_s=600"])
        _, paths = write(recipe, JOB, runs=tmp_path)
        text = b"signal=USR1 at=1000 end=1650\nJobId=17 JobState=RUNNING Reason=None\n"
        dray("finish", paths.folder, "--code", "75", "--stopped", stdin=text)
        result = json.loads(paths.result.read_text())
        assert result["reason"] == "the time limit"


def test_a_site_says_it() -> None:
    text = {"name": "mine", "about": "x", "grace_s": 300}
    assert Site.model_validate(text).grace_s == 300
