"""The Slurm configuration of the local cluster, as text."""

from __future__ import annotations

from dataclasses import dataclass

from dray.contract.findings import ConfigError

CONTROLLER = "controller"
MOST_NODES = 32
MOST_GPUS = 16

_SLURM_CONF = """\
ClusterName=local
SlurmctldHost={controller}
SlurmUser=slurm
AuthType=auth/munge
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid

# Containers share the kernel's cgroups with their host, so nothing may depend on them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none

# A node claims more than a small machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu

# Jobs start at once, also heterogeneous ones, which wait for the backfill scheduler.
SchedulerParameters=batch_sched_delay=0,bf_interval=1

# What cannot run is refused when it is submitted, not left waiting.
EnforcePartLimits=ALL
JobRequeue=1
ReturnToService=2
InactiveLimit=0
KillWait=30
MessageTimeout=10
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=30
TCPTimeout=2
UnkillableStepTimeout=60

NodeName=DEFAULT CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=32000
NodeName={nodes}{gres} State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20

# Its jobs preempt those of main, which Slurm requeues: tests of preemption need this.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes={nodes} Hidden=YES MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Its nodes and their GPUs."""

    nodes: int = 2
    gpus_per_node: int = 2

    def __post_init__(self) -> None:
        for option, least, most, given in (
            ("--nodes", 1, MOST_NODES, self.nodes),
            ("--gpus-per-node", 0, MOST_GPUS, self.gpus_per_node),
        ):
            if not least <= given <= most:
                raise ConfigError(
                    f"{option} is out of range",
                    wanted=f"{least} to {most}",
                    found=given,
                    fix=f"{option} {min(max(given, least), most)}",
                )

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(1, self.nodes + 1))


def slurm_files(size: Size) -> dict[str, str]:
    """Every file of /etc/slurm, the same on all machines."""
    nodes = f"n{_span(1, size.nodes)}"
    gpus = size.gpus_per_node
    gres = f"NodeName={nodes} Name=gpu File=/dev/fakegpu{_span(0, gpus - 1)}\n" if gpus else ""
    return {
        "slurm.conf": _SLURM_CONF.format(controller=CONTROLLER, nodes=nodes, gres=f" Gres=gpu:{gpus}" if gpus else ""),
        "gres.conf": f"AutoDetect=off\n{gres}",
        "cgroup.conf": "CgroupPlugin=disabled\n",
    }


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"
