"""Every file of the local cluster's Slurm configuration."""

from __future__ import annotations

import pytest

from dray.cluster.slurm_conf import Size, slurm_files
from dray.contract.findings import ConfigError

SLURM_CONF = """\
ClusterName=local
SlurmctldHost=controller
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
"""


MAIN = " Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20\n"
PREEMPTION = """
# Its jobs preempt those of main, which Slurm requeues: tests of preemption need this.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes={nodes} Hidden=YES MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


@pytest.mark.parametrize(
    ("size", "last_lines", "gres"),
    [
        (
            Size(nodes=2, gpus_per_node=2),
            "NodeName=n[1-2] Gres=gpu:2 State=UNKNOWN\nPartitionName=main Nodes=n[1-2]",
            "AutoDetect=off\nNodeName=n[1-2] Name=gpu File=/dev/fakegpu[0-1]\n",
        ),
        (
            Size(nodes=3, gpus_per_node=1),
            "NodeName=n[1-3] Gres=gpu:1 State=UNKNOWN\nPartitionName=main Nodes=n[1-3]",
            "AutoDetect=off\nNodeName=n[1-3] Name=gpu File=/dev/fakegpu0\n",
        ),
        (
            Size(nodes=1, gpus_per_node=0),
            "NodeName=n1 State=UNKNOWN\nPartitionName=main Nodes=n1",
            "AutoDetect=off\n",
        ),
    ],
)
def test_every_file(size, last_lines, gres):
    assert slurm_files(size) == {
        "slurm.conf": SLURM_CONF + last_lines + MAIN + PREEMPTION.format(nodes=last_lines.rpartition("=")[2]),
        "gres.conf": gres,
        "cgroup.conf": "CgroupPlugin=disabled\n",
    }


def test_nodes_are_named_from_one():
    assert Size(nodes=3).node_names == ("n1", "n2", "n3")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "--nodes is out of range\n  wanted: 1 to 32\n  found:  0\n  fix:    --nodes 1"),
        ({"nodes": 33}, "--nodes is out of range\n  wanted: 1 to 32\n  found:  33\n  fix:    --nodes 32"),
        (
            {"gpus_per_node": -1},
            "--gpus-per-node is out of range\n  wanted: 0 to 16\n  found:  -1\n  fix:    --gpus-per-node 0",
        ),
    ],
)
def test_a_size_out_of_range_is_refused(wrong, message):
    with pytest.raises(ConfigError) as refused:
        Size(**wrong)
    assert str(refused.value) == message
