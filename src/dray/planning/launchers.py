"""What starts the ranks in the container: each launcher as one command line for every node."""

from __future__ import annotations

from collections.abc import Sequence

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


def start(
    name: str, *, python: str, folder: str, hosts: Sequence[str], each: int, port: int, restarts: int
) -> tuple[str, ...]:
    """The launcher's words up to those of the program that it starts as every rank, which is no Python script."""
    nodes = len(hosts)
    if name == "torchrun":
        # The static rendezvous: c10d gives ranks to nodes in the order they come, so ranks would not follow the plan.
        # Starting ranks again takes c10d all the same: static agents do not tell one another that one has begun anew.
        static = ("--rdzv-backend=static", "--node-rank", NODE_RANK, "--master-addr", MASTER, f"--master-port={port}")
        anew = ("--rdzv-backend=c10d", "--rdzv-endpoint", ENDPOINT, "--rdzv-conf", IS_HOST)
        return (
            *(python, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={each}"),
            *(anew if restarts else static),
            *(f"--max-restarts={restarts}", "--no-python"),
        )
    if name == "accelerate":
        return (
            *(python, "-m", "accelerate.commands.launch", "--config_file", f"{folder}/{ACCELERATE_FILE}"),
            *(f"--num_machines={nodes}", f"--num_processes={nodes * each}"),
            *("--machine_rank", NODE_RANK, "--main_process_ip", MASTER, f"--main_process_port={port}", "--no_python"),
        )
    if name == "deepspeed":
        return (
            *(python, "-m", "deepspeed.launcher.runner", "--hostfile", f"{folder}/{HOSTFILE}"),
            *("--no_ssh", "--node_rank", NODE_RANK, "--master_addr", MASTER, f"--master_port={port}"),
            *("--no_python", "--no_local_rank"),
        )
    # No agent: dray's own few lines start the processes and wait. -S -E: they need nothing that is installed.
    return (python, "-S", "-E", RANKS, str(nodes), str(each), NODE_RANK, MASTER, str(port))


def files(name: str, *, hosts: Sequence[str], each: int, accelerate: str | None) -> dict[str, str]:
    """What a launcher reads, by name in the run folder."""
    if name == "accelerate":
        return {ACCELERATE_FILE: accelerate if accelerate is not None else ACCELERATE}
    if name == "deepspeed":
        return {HOSTFILE: "".join(f"{host} slots={each}\n" for host in hosts)}
    return {}
