"""By which interface ranks find one another: two nodes on one wire, whose names are loopback's, as Debian's are."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ALL

from dray.runner.rendezvous import gloo_interface
from helpers import PYTHON

# A machine of its own: a host name, an /etc/hosts and a network.
MACHINE = 'mount --bind "$1" /etc/hosts && hostname "$2" && ip link set lo up && echo up && exec sleep infinity'
RANK = """
import os, sys
from datetime import timedelta
from dray.train import collectives
from dray.train.errors import guarded
def main():
    collectives._STEP_TIMEOUT = timedelta(seconds=float(sys.argv[1]))
    collectives.init_distributed("cpu")
    group = collectives.control_group()._get_backend(collectives.torch.device("cpu"))
    print([collectives.all_gather_json(os.environ["GLOO_SOCKET_IFNAME"]), group.options._timeout.days])
guarded(main)
"""


def alone(*argv: object) -> None:
    subprocess.run([str(word) for word in argv], check=True, capture_output=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[list[str]]]:
    """How a command begins that runs on one of the two."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing or subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], check=False).returncode:
        why = f"no network of its own: it takes root{''.join(f', and {tool}' for tool in missing)}"
        assert not ALL, why
        pytest.skip(why)
    started, enter = [], []
    try:
        for number in (1, 2):
            hosts = tmp_path / f"hosts{number}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{number}\n")
            argv = ["unshare", "--net", "--mount", "--uts", "sh", "-c", MACHINE, "-", hosts, f"node{number}"]
            started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
            assert started[-1].stdout.readline() == "up\n"
            enter.append(["nsenter", "--target", str(started[-1].pid), "--net", "--mount", "--uts"])
        first, second = (one.pid for one in started)
        alone("ip", "link", "add", "hsn7", "netns", first, "type", "veth", "peer", "hsn8", "netns", second)
        for number, link in enumerate(("hsn7", "hsn8")):
            alone(*enter[number], "ip", "address", "add", f"10.9.0.{number + 1}/24", "dev", link)
            alone(*enter[number], "ip", "link", "set", link, "up")
        yield enter
    finally:
        for one in started:
            one.kill()
            one.communicate()


def run(plan: dict[str, Any], machines: list[list[str]], seconds: float, **env: str) -> list[int]:
    """Two nodes of one rank each; their exit codes."""
    folder = Path(plan["folder"])
    nodes = [{"name": f"node{number}", "address": f"10.9.0.{number}"} for number in (1, 2)]
    plan["world"] |= {"nodes": nodes, "ranks_per_node": 1, "size": 2, "master": "node1", "one_machine": False}
    ranks = [sys.executable, "{ranks}", "2", "1", "{node_rank}", "{master}", "{port}"]
    plan |= {"launcher": ranks, "command": [sys.executable, "-c", RANK, str(seconds)]}
    (folder / "plan.json").write_text(json.dumps(plan))
    started = []
    for number, enter in enumerate(machines):
        own = {"DRAY_NODE": str(number), "DRAY_NODES": "2", "DRAY_NODE_NAME": f"node{number + 1}", "DRAY_CPUS": "1"}
        argv = [*enter, sys.executable, "-m", "dray.runner", folder / "plan.json"]
        started.append(subprocess.Popen(argv, env={**os.environ, **PYTHON, **own, **env}, stdout=subprocess.DEVNULL))
    return [one.wait(timeout=300) for one in started]


@pytest.mark.seconds
@pytest.mark.torch
def test_gloo_listens_where_the_rendezvous_was(plan, machines):
    assert run(plan, machines, 240) == [0, 0]
    for rank in (0, 1):
        last = Path(plan["folder"], f"logs/rank-{rank}.log").read_text().splitlines()[-1]
        assert ast.literal_eval(last) == [["hsn7", "hsn8"], 7]


@pytest.mark.slow
@pytest.mark.torch
def test_ranks_that_never_connect_end_at_the_short_deadline(plan, machines):
    """What a site or a recipe sets is kept, also where it is wrong."""
    assert run(plan, machines, 3, GLOO_SOCKET_IFNAME="lo") == [69, 69]
    # The first to end ends the other.
    text = "".join(path.read_text() for path in Path(plan["folder"], "logs").glob("rank-*.log"))
    assert "the ranks could not connect to one another\n  wanted: connections between all ranks within 3 s\n" in text
    assert "\n          GLOO_SOCKET_IFNAME=lo\n  fix:    correct `interfaces` in the site's file, or " in text


@pytest.mark.parametrize("own", ["127.0.0.1", "127.0.1.1", "127.255.255.254"])
def test_loopback_has_one_interface(own):
    assert gloo_interface(own) == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("own", ["203.0.113.9", "0.0.0.0", "::1", "node1"])
def test_an_address_that_no_interface_has_sets_nothing(own):
    assert gloo_interface(own) == {}
