"""What starts the ranks in the container: each launcher as one command line for every node.

The first node's runner has torch's store served on its own socket. torchrun and accelerate join it by a rendezvous that
`dray.tcp_store.handler` registers, ranks of the others by TORCHELASTIC_USE_AGENT_STORE, which the runner sets. No
launcher starts ranks again: the runners do, each time with a new secret, port and store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dray.planning import accelerate

# What only a node knows, each an argument of its own. The runner fills it in; a plan never bakes a rank or a port.
NODE_RANK, MASTER, PORT, ENDPOINT, RANKS = "{node_rank}", "{master}", "{port}", "{endpoint}", "{ranks}"

_HOSTFILE = "hostfile"
_BY_HANDLER = "the launcher joins it as its rendezvous, and its ranks as the launcher's own"
_BY_VARIABLE = "ranks join it by TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, kw_only=True)
class Job:
    """The ranks that a launcher starts."""

    python: str
    folder: str
    hosts: Sequence[str]
    each: int
    """Ranks on a node."""
    accelerate: Mapping[str, str] = field(default_factory=dict)
    """The files that accelerate reads, by name."""


@dataclass(frozen=True)
class Launch:
    """How a launcher starts the ranks of a job."""

    argv: tuple[str, ...]
    """Its command line, up to the program that it starts as every rank; that need not be a Python script."""
    store: str = _BY_VARIABLE
    """How its ranks join the store."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The files that it reads in the attempt's folder, by name."""


def _torchrun(job: Job) -> Launch:
    argv = (
        job.python, "-m", "torch.distributed.run", f"--nnodes={len(job.hosts)}", f"--nproc-per-node={job.each}",
        "--rdzv-backend=dray", "--rdzv-endpoint", ENDPOINT, "--max-restarts=0", "--no-python",
    )  # fmt: skip
    return Launch(argv, _BY_HANDLER)


def _accelerate(job: Job) -> Launch:
    # Port 0: accelerate refuses one at which somebody listens, and the store does.
    argv = (
        job.python, "-m", "accelerate.commands.launch", "--config_file", f"{job.folder}/{accelerate.FILE}",
        f"--num_machines={len(job.hosts)}", f"--num_processes={len(job.hosts) * job.each}",
        "--machine_rank", NODE_RANK, "--main_process_ip", MASTER, "--main_process_port=0",
        "--rdzv_backend=dray", "--max_restarts=0", "--no_python",
    )  # fmt: skip
    return Launch(argv, _BY_HANDLER, job.accelerate)


def _deepspeed(job: Job) -> Launch:
    argv = (
        job.python, "-m", "deepspeed.launcher.runner", "--hostfile", f"{job.folder}/{_HOSTFILE}",
        "--no_ssh", "--node_rank", NODE_RANK, "--master_addr", MASTER, "--master_port", PORT,
        "--no_python", "--no_local_rank",
    )  # fmt: skip
    slots = "".join(f"{host} slots={job.each}\n" for host in job.hosts)
    return Launch(argv, files={_HOSTFILE: slots})


def _python(job: Job) -> Launch:
    # No agent: a few lines of dray start the processes and wait. -S -E: they need nothing that is installed.
    return Launch((job.python, "-S", "-E", RANKS, str(len(job.hosts)), str(job.each), NODE_RANK, MASTER, PORT))


def _ray(job: Job) -> Launch:
    # One process a node, which is Ray's head or a worker; Ray starts all others.
    return Launch(_python(job).argv, "Ray's head has a port of its own")


LAUNCHERS: dict[str, Callable[[Job], Launch]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "python": _python,
    "ray": _ray,
}
