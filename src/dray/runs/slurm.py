"""Slurm's commands: sbatch, squeue, scontrol, scancel, sacct, sacctmgr and sinfo, and what their answers mean.

Answers are read by format strings and `key=value` words, which are the same from Slurm 20.11 to 26.05; a site's
wrapper may print lines of its own between them.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from dray import process
from dray.config import dray_home
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError, DrayError
from dray.runs.store import Queued

JUST_S = 10.0  # until squeue lists a job after sbatch's answer
_ANSWER_S = 30.0
_QUICK_S = 5.0  # for what only helps, as in dray init
_LATE_S = 120.0  # clocks differ, and a job may be queued before its number is recorded
# squeue does not list ended jobs; all others have nodes.
_HELD = frozenset({"REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
_WAITING = _HELD | {"PENDING", "EXPEDITING", "REQUEUED"}
_COLUMNS = "%A|%i|%T|%V|%r|%S|%o"
# Times are seconds since 1970, or words such as N/A; the command may contain any character.
_LINE = re.compile(r"^([0-9]+)\|([^|\n]*)\|([^|\n]*)\|([0-9]*)[^|\n]*\|([^|\n]*)\|([0-9]*)[^|\n]*\|(.*)$", re.MULTILINE)
_RUN = re.compile("(?:^| )(--run=[^ ]*)")


def _answer(*argv: str, seconds: float | None = None) -> str:
    """What the command prints; empty without Slurm, or if its controller is busy, for which nobody must wait."""
    with suppress(DrayError, OSError):
        return process.run(argv, check=False, seconds=seconds or _QUICK_S).out
    return ""


def _on(cluster: str) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


class NoJobNumberError(DrayError):
    """sbatch has printed no number, so the job may be in the queue."""


def sbatch(argv: Sequence[str]) -> Queued:
    """Submit the job of a whole `sbatch --parsable` command. DrayError if sbatch refuses."""
    printed = process.run(argv).out
    found = re.findall(r"^(?:Submitted batch job )?(\d+)(?:;(\S+))?\s*$", printed, re.MULTILINE)
    if not found:
        raise NoJobNumberError(
            "sbatch printed no job number", where="sbatch", wanted="a line such as 42 or 42;cluster",
            found=printed.strip()[-300:], fix="squeue --me shows whether the job is in the queue",
        )  # fmt: skip
    number, cluster = found[-1]
    return Queued(job=int(number), cluster=cluster, time=time.time(), argv=list(argv))


# Jobs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A job that waits, runs or is ending."""

    number: int
    id: str
    """The id for scancel, such as 12_3. `number` is ambiguous for arrays: tasks that have not started share it, and so
    does the last task to start."""
    state: str
    submitted: float
    reason: str
    """Why it waits."""
    start: float | None
    """When it started; while it waits, the start that Slurm expects, or the earliest possible."""
    command: str
    """The script and its arguments, separated by spaces."""

    @property
    def waits(self) -> bool:
        """Whether it has no nodes."""
        return self.state in _WAITING

    @property
    def held(self) -> bool:
        """Whether it starts only when somebody releases it."""
        return self.state in _HELD or self.reason.startswith(("JobHeld", "launch failed requeued held"))

    @property
    def by_salloc(self) -> bool:
        """Whether it is an allocation, which outlives the runs in it."""
        return self.command in ("", "(null)")


def jobs(cluster: str = "") -> list[Job]:
    """All jobs of this user. DrayError if Slurm is missing or does not answer."""
    # Variables such as SQUEUE_PARTITION would hide jobs.
    hidden = [f"--unset={name}" for name in os.environ if name.startswith("SQUEUE_")]
    options = ["--array", "--noheader", f"--user={os.geteuid()}", *_on(cluster), f"--format={_COLUMNS}"]
    argv = ["env", *hidden, "squeue", *options] if hidden else ["squeue", *options]
    printed = printable(process.run(argv, env={"SLURM_TIME_FORMAT": "%s"}, seconds=_ANSWER_S).out)
    return [
        Job(int(number), id_, state, float(submitted or 0), reason, float(start) if start else None, command.strip())
        for number, id_, state, submitted, reason, start, command in _LINE.findall(printed)
    ]


class Slurm:
    """This user's jobs, for many runs: each cluster is asked once, even if it does not answer."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, list[Job]] | DrayError] = {}
        self._asked: dict[str, float] = {}

    def jobs(self, cluster: str = "") -> dict[str, list[Job]]:
        """All jobs of this user on the cluster, by id and by `--run=` in their commands, to its first space: most runs
        have none. DrayError if Slurm is missing or does not answer."""
        if cluster not in self._known:
            self._asked[cluster] = time.time()
            try:
                by_key: dict[str, list[Job]] = defaultdict(list)
                for job in jobs(cluster):
                    for key in (job.id, *_RUN.findall(job.command)):
                        by_key[key].append(job)
                self._known[cluster] = by_key
            except DrayError as silent:
                self._known[cluster] = silent
        known = self._known[cluster]
        if isinstance(known, DrayError):
            raise known
        return known

    @cached_property
    def is_absent(self) -> bool:
        """Whether this machine has no Slurm at all."""
        return not process.which("squeue")

    @cached_property
    def cluster(self) -> str:
        """The name of this machine's cluster; empty if Slurm does not answer."""
        return cluster_name()

    def is_older(self, at: float, cluster: str = "") -> bool:
        """Whether Slurm was asked before this time and so cannot know of it; a future time is another clock's error."""
        return self._asked.get(cluster, math.inf) < at < time.time() + JUST_S

    def job_of(self, ids: Mapping[str, float], folders: Iterable[str], cluster: str = "") -> Job | None:
        """A job with one of these ids that existed at that time, or with such a run folder (`--run=`). A running job
        comes before a waiting one. DrayError as from `jobs`."""
        known = self.jobs(cluster)
        found = [job for id_, at in ids.items() for job in known.get(id_, ()) if self._existed(job, at, cluster)]
        for folder in folders:
            option = f" --run={folder} "  # its name may contain spaces
            found += [job for job in known.get(option.split(" ")[1], ()) if option in f" {job.command} "]
        return min(found, key=lambda job: job.waits, default=None)

    @staticmethod
    def _existed(job: Job, at: float, cluster: str) -> bool:
        """Whether the job existed at this time; else Slurm reused its number. DrayError if Slurm does not answer."""
        if job.submitted <= at + _LATE_S:
            return True
        # A requeue changes that time. Not `show`: taken for "no", silence would let a second job write into the run.
        shown = process.run(["scontrol", *_on(cluster), "show", "job", "--oneliner", job.id], seconds=_ANSWER_S).out
        return fields(shown).get("Restarts", "0") != "0"


def cancel(job: Job, cluster: str = "", *, waiting: bool = False) -> None:
    """Cancel the job; with `waiting`, only if it has not started. DrayError if Slurm refuses."""
    # `--state=PENDING` does not find a held job, which cannot start meanwhile.
    state = ["--state=PENDING"] if waiting and job.state not in _HELD else []
    argv = ["scancel", *_on(cluster), *state, job.id]
    process.run(argv, check=not state, seconds=_ANSWER_S)  # with a state, it also fails if no job matches


def release(job: Job, cluster: str = "") -> None:
    """Let a held job start. DrayError if Slurm refuses."""
    process.run(["scontrol", *_on(cluster), "release", job.id], seconds=_ANSWER_S)


def show(job: int | str, cluster: str = "") -> dict[str, str]:
    """What `scontrol show job` tells of a job, and for some minutes after its end; empty if Slurm does not know it, or
    does not answer."""
    argv = ["scontrol", *_on(cluster), "show", "job", "--oneliner", str(job)]
    return fields(_answer(*argv, seconds=_ANSWER_S))


def fields(shown: str) -> dict[str, str]:
    """The `key=value` words in what scontrol, or the batch script after it, has printed."""
    return dict(re.findall(r"(?:^|(?<=\s))(\w+)=(\S*)", shown))


def is_batch(job: Mapping[str, str]) -> bool:
    """Whether Slurm can requeue the job: a batch job, not an salloc allocation, which may have other work too."""
    return job.get("BatchFlag") == "1"


_BY_REASON = {"TimeLimit": "TIMEOUT", "NodeDown": "NODE_FAIL", "DeadLine": "DEADLINE", "Preempted": "PREEMPTED"}


def end_state(job: Mapping[str, str]) -> str:
    """The state in which a job ended or is ending, from `show`: while it ends, its JobState is COMPLETING."""
    preempted = job.get("PreemptTime", "")[:1].isdigit()  # else None or N/A
    return _BY_REASON.get(job.get("Reason", ""), "PREEMPTED" if preempted else job.get("JobState", ""))


def last_state(job: int | str, cluster: str = "") -> str:
    """The state of an ended job, such as `CANCELLED by 1000`, from sacct or else from scontrol; empty if neither
    knows it."""
    argv = ["sacct", "-X", "-n", "-P", f"--jobs={job}", *_on(cluster), "--format=State"]
    lines = _answer(*argv, seconds=_ANSWER_S).strip().splitlines()
    if lines:
        return lines[-1][:100]
    return end_state(show(job)) if cluster in ("", cluster_name()) else ""


_MEANINGS = {
    "None": "Slurm gives no reason yet",
    "Priority": "jobs with a higher priority run first",
    "Resources": "it waits for free nodes",
    "BeginTime": "its begin time has not come; Slurm waits two minutes before it starts a requeued job",
    "DependencyNeverSatisfied": "the job that it depends on failed, so it never starts: cancel it with scancel",
    "Dependency": "it waits for another job to end",
    "PartitionTimeLimit": "it asks for more time than the partition allows, so it never starts: use a shorter --time",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows: use fewer --nodes",
    "Partition": "the partition starts no jobs at the moment",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved, often for maintenance",
    "Nodes required": "nodes that it needs are down, drained or reserved, often for maintenance",
    "Reservation": "it waits for its reservation",
    "Licenses": "it waits for a license",
    "JobHeldUser": "its user holds it: scontrol release JOB releases it",
    "JobHeldAdmin": "an administrator holds it",
    "JobArrayTaskLimit": "its array already runs the allowed number of tasks",
    "Job": "its own limits or its state keep it waiting",
    "BadConstraints": "no node has the features that it asks for, so it never starts",
    "InvalidAccount": "its account is invalid: use another --account",
    "InvalidQOS": "its quality of service is invalid: use another --qos",
    "launch failed requeued held": "Slurm could not start it and holds it: scontrol release JOB releases it",
    "QOS": "a limit of its quality of service (QOS) is reached",
    "Assoc": "a limit of its account or user is reached",
    "MaxCpuPerAccount": "a limit of its account is reached",
}


def meaning(reason: str) -> str:
    """Why a job waits, in plain words: the meaning of the first name with which Slurm's reason begins, else empty."""
    return next((text for name, text in _MEANINGS.items() if reason.startswith(name)), "")


# The cluster ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A Slurm partition, and what each of its nodes has."""

    name: str
    nodes: int
    cpus: int
    gres: str

    @property
    def gpus(self) -> int:
        return sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", self.gres))


def conf() -> dict[str, str]:
    """slurm.conf, from scontrol; empty without Slurm, or if its controller does not answer in time."""
    return dict(re.findall(r"^(\w+) *= (.*?) *$", _answer("scontrol", "show", "config"), re.MULTILINE))


def cluster_name(config: Mapping[str, str] | None = None) -> str:
    """What Slurm calls this cluster; empty without Slurm."""
    name = os.environ.get("SLURM_CLUSTER_NAME", "")
    return name or (conf() if config is None else config).get("ClusterName", "")


def preemption(config: Mapping[str, str], names: Sequence[str] = ()) -> dict[str, object]:
    """Facts on preemption in the first of these partitions, or in the default one."""
    found: dict[str, object] = {}
    if kill := re.match("[0-9]{1,9}", config.get("KillWait", "")):
        found["kill_wait_s"] = int(kill[0])
    if config.get("PreemptType", "(null)") in ("(null)", "preempt/none"):
        return found
    key, wanted = ("PartitionName", names) if names else ("Default", ["YES"])
    shown = map(fields, _answer("scontrol", "show", "partition", "--oneliner").splitlines())
    partition = next((one for one in shown if one.get(key) in wanted), {})
    found["preempt_signal"] = "send_user_signal" in config.get("PreemptParameters", "")
    found["preempt_mode"] = partition.get("PreemptMode", "")
    if (grace := partition.get("GraceTime", "")).isdecimal():
        found["preempt_grace_s"] = int(grace)
    return found


def partitions() -> list[Partition]:
    """Slurm's partitions, in its own order; none without Slurm. DrayError if Slurm does not answer in time."""
    if not process.which("sinfo"):
        return []
    printed = process.run(["sinfo", "--noheader", "--format=%P|%D|%c|%G"], seconds=_QUICK_S).out
    rows = re.findall(r"^([^|\n*]+)\*?\|(\d+)[^|\n]*\|(\d+)[^|\n]*\|([^|\n]*)$", printed, re.MULTILINE)
    return [
        Partition(name=name, nodes=int(nodes), cpus=int(cpus), gres=gres)
        for name, nodes, cpus, gres in dict.fromkeys(rows)
    ]


def limits() -> dict[str, str]:
    """The longest time of a job, by partition."""
    lines = _answer("sinfo", "--noheader", "--format=%R|%l").splitlines()
    return dict(line.split("|") for line in lines if line.count("|") == 1)


def offered(option: str) -> list[str]:
    """The values that --account, --constraint or --qos may have for this user; none if Slurm does not answer."""
    user = os.environ.get("USER", os.geteuid())
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", f"format={option}", f"user={user}"]
    if option == "constraint":
        argv = ["sinfo", "--noheader", "--format=%f"]
    return sorted({name for name in re.split(r"[\s,]+", _answer(*argv)) if re.fullmatch(r"[\w.@+-]+", name)})


# The allocation around this shell --------------------------------------------------------------------------------

# Where salloc starts the shell on the first node (LaunchParameters=use_interactive_step), in a step with this number.
_INTERACTIVE = "4294967290"
_WHOLE = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")


class Allocation(NamedTuple):
    """The salloc allocation around this shell: `dray run` uses its nodes without waiting in the queue."""

    job: str
    nodelist: str
    nodes: str

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Allocation | None:
        """The allocation in these variables; None inside batch scripts and srun steps."""
        step = env.get("SLURM_STEP_ID", _INTERACTIVE)
        if env.get("ENVIRONMENT") == "BATCH" or step != _INTERACTIVE or not all(env.get(name) for name in _WHOLE):
            return None
        return cls(*(env[name] for name in _WHOLE))

    def __str__(self) -> str:
        return f"job {self.job} on {self.nodelist}"

    def require_nodes(self, nodes: int | None) -> None:
        """Refuse a --nodes other than all nodes of the allocation."""
        if nodes is not None and str(nodes) != self.nodes:
            raise ConfigError(
                "a run in an allocation uses all of its nodes",
                wanted=f"--nodes {self.nodes}, or no --nodes",
                found=f"--nodes {nodes}",
                fix="leave out --nodes; or use salloc --nodes=N for another size, or --local for this machine only",
            )

    def argv(self, *, run: str, site: str, recipe: Sequence[str], command: Sequence[str]) -> list[str]:
        """The bash command that starts the batch script inside the allocation."""
        script = "singlenode.sh" if self.nodes == "1" else "multinode.sh"
        argv = ["bash", str(dray_home.root() / "slurm" / script)]
        if run:
            argv.append(f"--run={run}")
        if site:
            argv.append(f"--site={site}")
        argv += recipe
        return [*argv, "--", *command] if command else argv


def allocation_environment(env: Mapping[str, str], runs: Path) -> dict[str, str]:
    """The environment for the batch script: the command runs in the current folder, not in salloc's."""
    return {
        **env,
        "DRAY_HOME": str(dray_home.root()),
        "DRAY_RUNS": str(runs),
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
    }
