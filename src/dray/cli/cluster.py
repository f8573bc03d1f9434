"""dray cluster: a real Slurm with Apptainer on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import typer

from dray import process
from dray.cli.streams import say
from dray.clients.docker import client, endpoint
from dray.cluster.containers import USER
from dray.cluster.health import Health
from dray.cluster.local import LocalCluster
from dray.cluster.slurm_conf import CONTROLLER
from dray.contract.findings import UnfitError

cluster_verbs = typer.Typer()

_USAGE = """\
  dray cluster shell                                       open a shell on it; then, for example:
  sbatch --wait slurm/multinode.sh recipes/smoke-cpu.toml  train on two of its nodes
  dray cluster exec -- dray submit recipes/smoke-cpu.toml  any verb of dray, as at a login node
  dray cluster status | down                               show its health; remove it"""


@contextmanager
def _cluster() -> Iterator[LocalCluster]:
    with closing(client()) as engine:
        yield LocalCluster(engine)


@cluster_verbs.command()
def up(
    nodes: int = 2,
    gpus_per_node: int = 2,
    base: str | None = None,
) -> None:
    """Start the cluster, or repair it; fast if it is healthy.

    --nodes N: Nodes besides the controller.
    --gpus-per-node N: Fake GPUs of each node.
    --base BASE: Debian trixie, as an image reference or a tar of a root filesystem. Default: DRAY_CLUSTER_BASE,
      else the running cluster's, else build/base/trixie.tar, else the pinned image.

    dray cluster up --nodes 2
    """
    with _cluster() as cluster:
        _show(cluster.up(nodes=nodes, gpus_per_node=gpus_per_node, base=base, say=say))
    print(_USAGE)


@cluster_verbs.command()
def status() -> None:
    """Show the cluster's machines and their states; exit code 69 if something is wrong.

    dray cluster status
    """
    with _cluster() as cluster:
        health = cluster.health()
    if health is None:
        raise UnfitError("there is no cluster", fix="dray cluster up")
    _show(health)
    if health.problems:
        raise UnfitError("the cluster is not healthy", found="\n".join(health.problems), fix="dray cluster up")


@cluster_verbs.command()
def shell() -> None:
    """Open a shell on the controller, as the cluster's ordinary user, in this checkout.

    dray cluster shell
    """
    with _cluster() as cluster:
        container = cluster.machine(CONTROLLER)
    argv = ["docker", "--host", endpoint().url, "exec", "--interactive", "--tty", "--user", USER]
    process.replace([*argv, "--workdir", container.labels["dray.checkout"], str(container.name), "bash", "--login"])


@cluster_verbs.command(name="exec")
def exec_(
    command: list[str],
    node: str = CONTROLLER,
    user: str = USER,
) -> int:
    """Run a command on the cluster, in this checkout, and return its exit code. `dray` itself runs in the CPU image.

    COMMAND: The command and its arguments, after --.
    --node NAME: The machine: controller, n1, n2 ...
    --user NAME: The user: dray or root.

    dray cluster exec -- sinfo
    dray cluster exec -- dray submit recipes/smoke-cpu.toml --follow
    """
    if command[0] == "dray":
        command = ["bash", "slurm/dray", *command[1:]]
    with _cluster() as cluster:
        ended = cluster.exec(command, node=node, user=user, show=True)
    return ended.code


@cluster_verbs.command()
def down() -> None:
    """Remove the cluster's containers and network; the shared folder stays.

    dray cluster down
    """
    with _cluster() as cluster:
        removed = cluster.down()
    say(f"removed {', '.join(removed)}" if removed else "there was no cluster")


def _show(health: Health) -> None:
    columns = "{:<12}{:<12}{:<12}{}"
    print(columns.format("machine", "container", "Slurm", "GPUs"))
    for machine in health.machines:
        print(columns.format(machine.name, machine.container, machine.slurm, machine.gpus))
    print(f"Slurm {health.slurm}, Apptainer {health.apptainer}; /shared is {health.shared}")
