"""The trainer's process groups: how many connections a rank holds, and what a rank that dies does to the others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dray.contract.processes import unprinted

if TYPE_CHECKING:
    from trainings import Forks

# Each rank connects at first use, and tells how many sockets it has. Then one dies, and the others wait for it.
SCRIPT = """
import functools, json, os, sys
import torch, torch.distributed as dist
from dray.train import collectives

def sockets():
    held = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(one) and os.readlink(one).startswith("socket:") for one in held)

def rank(number, store, ranks):
    torch.set_num_threads(1)
    at = {"store": dist.FileStore(store, ranks), "rank": number, "world_size": ranks}
    dist.init_process_group = functools.partial(dist.init_process_group, **at)
    before = sockets()
    collectives.init_distributed("cpu")
    found = [sockets() - before]
    assert collectives.broadcast_json(f"of {number}") == "of 0"
    assert collectives.all_gather_json(number) == list(range(ranks))
    collectives.on_rank_0(lambda: None)
    found.append(sockets() - before)
    everybody = collectives.all_gather_json(found)
    if number == 0:
        print(json.dumps(everybody), flush=True)
    if number == 3:
        os._exit(1)
    try:
        collectives.barrier()
    except RuntimeError:
        os._exit(0)

pids = []
for number in range(int(sys.argv[2])):
    pids.append(os.fork())
    if not pids[-1]:
        rank(number, sys.argv[1], int(sys.argv[2]))
        os._exit(2)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


def started(forks: Forks, folder: Path, lazy: str, ranks: int) -> tuple[list[list[int]], list[int]]:
    env = {"TORCH_GLOO_LAZY_INIT": lazy, "GLOO_SOCKET_IFNAME": "lo"}
    done = forks.python("-c", SCRIPT, folder / "store", str(ranks), **env)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    return json.loads(first), json.loads(last)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("lazy", "ranks", "connections"),
    # 1, 2, 4 and 8 ranks before and behind, where 8 is the same; all others, in each of two groups.
    [
        pytest.param("1", 16, 7, marks=pytest.mark.slow),
        ("1", 11, 8),
        pytest.param("0", 11, 2 * 10, marks=pytest.mark.slow),
    ],
)
def test_a_rank_connects_to_few_others_and_hears_of_one_that_dies(
    forks: Forks, tmp_path: Path, lazy: str, ranks: int, connections: int
) -> None:
    found, codes = started(forks, tmp_path, lazy, ranks)
    assert found == [[connections + 2] * 2] * ranks  # and a socket that listens, in each group; no more after the first
    assert codes == [int(number == 3) for number in range(ranks)]


def test_what_a_library_prints_is_not_seen(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before\n")
    with unprinted():
        os.write(1, b"meanwhile\n")
    os.write(1, b"behind\n")
    assert capfd.readouterr().out == "before\nbehind\n"
