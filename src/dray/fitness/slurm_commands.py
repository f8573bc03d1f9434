"""Slurm's configuration, its partitions and this user's accounts, as its commands tell them."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dray import process
from dray.contract.findings import DrayError

_ANSWER_S = 5.0


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


def cluster_name(config: Mapping[str, str] | None = None) -> str:
    """What Slurm calls this cluster; empty without Slurm."""
    name = os.environ.get("SLURM_CLUSTER_NAME", "")
    return name or (conf() if config is None else config).get("ClusterName", "")


def conf() -> dict[str, str]:
    """slurm.conf, from scontrol; empty without Slurm, or if its controller does not answer in time."""
    return dict(re.findall(r"^(\w+) *= (.*?) *$", _answer("scontrol", "show", "config"), re.MULTILINE))


def preemption(config: Mapping[str, str], names: Sequence[str] = ()) -> dict[str, object]:
    """Facts on preemption in these partitions, or in the default one; of several grace times the shortest."""
    found: dict[str, object] = {}
    if kill := re.match("[0-9]{1,9}", config.get("KillWait", "")):
        found["kill_wait_s"] = int(kill[0])
    if config.get("PreemptType", "(null)") in ("(null)", "preempt/none"):
        return found
    found["preempt_signal"] = "send_user_signal" in config.get("PreemptParameters", "").split(",")
    lines = _answer("scontrol", "show", "partition", "--oneliner").splitlines()
    partitions = [dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line)) for line in lines]
    key, wanted = ("PartitionName", names) if names else ("Default", ["YES"])
    partitions = [one for one in partitions if one.get(key) in wanted]
    modes = [one.get("PreemptMode", "") or config.get("PreemptMode", "") for one in partitions]
    graces = [int(one["GraceTime"]) for one in partitions if re.fullmatch("[0-9]{1,9}", one.get("GraceTime", ""))]
    found["preempt_mode"] = next((mode for mode in modes if mode != "OFF"), "OFF" if modes else "")
    return found | ({"preempt_grace_s": min(graces)} if graces else {})


def _answer(*argv: str) -> str:
    """What Slurm's command prints; empty without Slurm, or if its controller is busy, for which nobody must wait."""
    with suppress(DrayError, OSError):
        return process.run(argv, check=False, seconds=_ANSWER_S).out
    return ""


def partitions() -> list[Partition]:
    """Slurm's partitions, in its own order; none without Slurm. DrayError if Slurm does not answer in time."""
    if not process.which("sinfo"):
        return []
    printed = process.run(["sinfo", "--noheader", "--format=%R|%D|%c|%G"], seconds=_ANSWER_S).out
    found = []
    for line in dict.fromkeys(printed.splitlines()):
        if line.count("|") == 3:  # a site's wrapper may print more
            name, nodes, cpus, gres = line.split("|")
            found.append(Partition(name=name, nodes=_number(nodes), cpus=_number(cpus), gres=gres))
    return found


def limits() -> dict[str, str]:
    """The longest time of a job, by partition."""
    lines = _answer("sinfo", "--noheader", "--format=%R|%l").splitlines()
    return dict(line.split("|") for line in lines if line.count("|") == 1)


def features() -> list[str]:
    """The features that --constraint may name."""
    return sorted({*re.split("[\n,]", _answer("sinfo", "--noheader", "--format=%f"))} - {"", "(null)"})


def accounts() -> list[str]:
    """The Slurm accounts that this user's jobs may name; none if Slurm has none, or does not answer in time."""
    return _associated("account")


def qualities() -> list[str]:
    """The names that --qos may give, likewise."""
    return _associated("qos")


def _associated(column: str) -> list[str]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id that no passwd knows
        return []
    options = ("--noheader", "--parsable2", "show", "associations", f"format={column}", f"user={user}")
    names = re.split(r"[\s,]+", _answer("sacctmgr", *options))
    return sorted({name for name in names if re.fullmatch(r"[\w.@+-]+", name)})


def _number(text: str) -> int:
    return int(re.sub(r"\D.*", "", text) or 0)
