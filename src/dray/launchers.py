"""What starts the ranks in the container: each launcher as one command line for every node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# What only a node knows, as words of their own. The runner puts each node's in; a plan never bakes a rank.
NODE_RANK, MASTER, ENDPOINT, IS_HOST, RANKS = "{node_rank}", "{master}", "{endpoint}", "{is_host}", "{ranks}"

ACCELERATE_FILE, HOSTFILE = "accelerate.yaml", "hostfile"
# Everything else comes as an option. MULTI_GPU also on CPUs: any other kind starts one process and says nothing.
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: 'no'
same_network: true
rdzv_backend: static
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a launcher must be told."""

    python: str
    folder: str
    hosts: tuple[str, ...]
    ranks_per_node: int
    port: int
    restarts: int


def argv(name: str, job: Job) -> tuple[str, ...]:
    """The launcher's words up to those of the program that it starts as every rank, which is no Python script."""
    return _LAUNCHERS[name](job)


def files(name: str, job: Job, accelerate: str | None) -> dict[str, str]:
    """What a launcher reads, by name in the run folder."""
    if name == "accelerate":
        return {ACCELERATE_FILE: accelerate if accelerate is not None else ACCELERATE}
    if name == "deepspeed":
        return {HOSTFILE: "".join(f"{host} slots={job.ranks_per_node}\n" for host in job.hosts)}
    return {}


def _torchrun(job: Job) -> tuple[str, ...]:
    # The static rendezvous: c10d gives ranks to nodes in the order they come, so ranks would not follow the plan.
    # Starting ranks again takes c10d all the same: static agents do not tell one another that one has begun anew.
    meeting: tuple[str, ...]
    if job.restarts:
        meeting = ("--rdzv-backend=c10d", "--rdzv-endpoint", ENDPOINT, "--rdzv-conf", IS_HOST)
    else:
        port = f"--master-port={job.port}"
        meeting = ("--rdzv-backend=static", "--node-rank", NODE_RANK, "--master-addr", MASTER, port)
    return (
        *(job.python, "-m", "torch.distributed.run"),
        *(f"--nnodes={len(job.hosts)}", f"--nproc-per-node={job.ranks_per_node}", *meeting),
        *(f"--max-restarts={job.restarts}", "--no-python"),
    )


def _accelerate(job: Job) -> tuple[str, ...]:
    return (
        *(job.python, "-m", "accelerate.commands.launch", "--config_file", f"{job.folder}/{ACCELERATE_FILE}"),
        *(f"--num_machines={len(job.hosts)}", f"--num_processes={len(job.hosts) * job.ranks_per_node}"),
        *("--machine_rank", NODE_RANK, "--main_process_ip", MASTER, f"--main_process_port={job.port}", "--no_python"),
    )


def _deepspeed(job: Job) -> tuple[str, ...]:
    return (
        *(job.python, "-m", "deepspeed.launcher.runner", "--hostfile", f"{job.folder}/{HOSTFILE}"),
        *("--no_ssh", "--node_rank", NODE_RANK, "--master_addr", MASTER, f"--master_port={job.port}"),
        *("--no_python", "--no_local_rank"),
    )


def _python(job: Job) -> tuple[str, ...]:
    # No agent: dray's own few lines start the processes and wait. -S -E: they need nothing that is installed.
    return (
        *(job.python, "-S", "-E", RANKS, str(len(job.hosts)), str(job.ranks_per_node)),
        *(NODE_RANK, MASTER, str(job.port)),
    )


_LAUNCHERS: dict[str, Callable[[Job], tuple[str, ...]]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "python": _python,
}
