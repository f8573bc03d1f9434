"""The names in a run folder. Strings: pathlib would add a third to the start of each rank's supervisor.

RUN/job.json                the job that `dray submit` has put into the queue, before it has an attempt
RUN/summary.json            what `dray runs` shows of it, once its last attempt has ended or was killed
RUN/replay.toml             its recipe, where `dray replay` has submitted it, and files that this names
RUN/source.json             the code that it was submitted from, where the nodes have no git; its diff is source.diff
RUN/checkpoints/            what all attempts share
RUN/compiled/               compiled code, likewise; only from a run folder, since to read it is to run it
RUN/trackers/               what TensorBoard and other trackers keep, likewise
RUN/attempt-1/plan.json     one try of the run: plan, scripts, logs, failures, metrics, result, capsule
RUN/attempt-2/...           the next, after a requeue or by hand

STUDY/study.json            beside the runs: which of them belong together (dray study); those of a tuning are in it
STUDY/tasks                 with Slurm: a line for each run, which the task of an array with its number reads
"""

from __future__ import annotations

JOB = "job.json"
SUMMARY = "summary.json"
STUDY = "study.json"
TASKS = "tasks"
CHECKPOINTS = "checkpoints"
COMPILED = "compiled"
TRACKERS = "trackers"
FINAL_MODEL = "final"  # in the checkpoints

# Of the run folder, by the recipe's runs.share. What is made in a shared one gets its group.
MODES = {"none": 0o700, "group": 0o2750}

# In the folder of an attempt.
PLAN = "plan.json"
NODE_SCRIPT = "node.sh"
SRUN_OPTIONS = "srun.options"
FACTS = "facts.txt"
SECRET = "secret"  # noqa: S105  the name of a file
RENDEZVOUS = "rendezvous.json"
PROCESS_GROUP = "process_group.json"  # only where a process group is smaller than the world
STARTUP = "startup.json"  # how long each part of the start took, on each node
FAILING_NODES = "failing_nodes.txt"  # for sbatch --exclude: those that their own check found unfit
LOGS = "logs"
FAILURES = "failures"
PREFLIGHT = "preflight"
HANG = "hang"
PREFLIGHT_REPORT = "preflight/report.json"
METRICS = "metrics.jsonl"
PROFILE = "profile.json"  # of the steps of train.profile: the longest kernels
PROFILE_TRACE = "profile.trace.json.gz"  # the same steps, for Perfetto or chrome://tracing
RESULT = "result.json"
CAPSULE = "capsule.json"
NODES = "nodes"
SOURCE = "source.json"
SOURCE_DIFF = "source.diff"  # what the user's own code has beside its commit
NEXT = "next"  # what the batch script asks of Slurm once all is written
ENDED = "ended"  # the token of a lease on the checkpoints whose job is gone, as Slurm has told the batch script
STOP = "stop"  # empty until somebody asks the run to save and end
SAVED = "saved"  # empty, by the first node's runner: all ranks have saved and ended, as they were asked to
BY_USER = "dray stop"  # a line in it: the run does not go back into the queue
NOW = "dray stop --now"  # a line in it: nor does it save
PROCESS = "process.json"  # what runs it here, of a run without Slurm
ENTER_SCRIPT = "enter.sh"  # starts a command in the container of an active run


def attempt(number: int | str) -> str:
    """The folder of an attempt; the first is 1."""
    return f"attempt-{number}"


def node(number: int | str) -> str:
    """What a node is: processor, memory, kernel, GPUs."""
    return f"{NODES}/node-{number}.json"


def node_log(node: int | str) -> str:
    """What the runner and the launcher of a node write."""
    return f"{LOGS}/node-{node}.log"


def rank_log(rank: int | str) -> str:
    """Both streams of a rank."""
    return f"{LOGS}/rank-{rank}.log"


def failure(name: str) -> str:
    """Why a node (`node-0`) or a rank (`rank-3`) failed."""
    return f"{FAILURES}/{name}.json"


def hang(restart: int) -> str:
    """The folder with what was saved of ranks that hung, after so many restarts; the first start is 0."""
    return f"{HANG}/restart-{restart}" if restart else HANG


def restart(number: int | str) -> str:
    """The folder with the failures that led to this restart of all ranks; the first restart is 1."""
    return f"{FAILURES}/restart-{number}"
