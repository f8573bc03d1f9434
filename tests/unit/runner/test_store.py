"""torch's store on the runner's socket, joined by the real launchers on two nodes of this machine."""

from __future__ import annotations

import datetime
import json
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import TCPStore

from dray.planning import accelerate, launchers
from dray.runner import children
from dray.runner.records import write_process_group
from dray.runs.prepare import read_recipe
from nodes import Start

pytestmark = [pytest.mark.torch, pytest.mark.hostile("store")]

SCRIPT = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
listening = sorted(
    bytes.fromhex(line.split()[1].split(":")[0])[::-1].hex()
    for line in open("/proc/net/tcp").read().splitlines()[1:]
    if line.split()[3] == "0A" and int(line.split()[1].split(":")[1], 16) == int(os.environ["MASTER_PORT"])
)
seen = {"rank": dist.get_rank(), "node": int(os.environ["GROUP_RANK"]), "sum": int(total), "listening": listening}
seen |= {"port": os.environ["MASTER_PORT"], "again": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))}
seen["most"] = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
if len(sys.argv) > 2 and not seen["again"] and seen["rank"] == int(sys.argv[2]):
    sys.exit(9)
with open(f"{sys.argv[1]}/seen-{seen['rank']}.json", "w") as file:
    json.dump(seen, file)
dist.barrier()
os._exit(0)
"""


def launch(
    name: str, plan: dict[str, Any], start: Start, folder: Path, *words: str, script: str = SCRIPT, **more: str
) -> list[Any]:
    """What the four ranks of two nodes saw."""
    (folder / "script.py").write_text(script)
    job = launchers.Job(
        python=sys.executable, folder=str(folder), hosts=("node1", "node2"), each=2,
        accelerate=accelerate.files(read_recipe(None, [f"launcher={name}"], ["script.py"]), str(folder)),
    )  # fmt: skip
    launch = launchers.LAUNCHERS[name](job)
    for file, text in launch.files.items():
        (folder / file).write_text(text)
    plan["launcher"] = list(launch.argv)
    plan["command"] = [sys.executable, str(folder / "script.py"), str(folder), *words]
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HOME": str(folder)}
    env |= more
    nodes = [start(number, 2, f"node{number + 1}", **env) for number in (0, 1)]
    said = [node.communicate(timeout=120) for node in nodes]
    logs = [path.read_text() for path in (folder / "logs").glob("rank-*.log")]
    assert [node.returncode for node in nodes] == [0, 0], (said, logs)
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.seconds
@pytest.mark.parametrize("name", ["torchrun", pytest.param("accelerate", marks=pytest.mark.slow), "python"])
def test_ranks_join_the_runner_s_store(name: str, plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    """No listener on every interface: the one on the port of the ranks is on the address that the runner has bound."""
    seen = launch(name, plan, start, tmp_path)
    told = json.loads((tmp_path / "rendezvous.json").read_text())
    assert [(one["rank"], one["node"], one["sum"]) for one in seen] == [(0, 0, 4), (1, 0, 4), (2, 1, 4), (3, 1, 4)]
    assert {one["port"] for one in seen} == {str(told["port"])}
    assert {tuple(one["listening"]) for one in seen} == {("7f000001",)}
    assert not (tmp_path / "process_group.json").exists()  # all of them are in one


LONE = """
import os, sys
rank = int(os.environ["RANK"])
if sys.argv[2] != "nobody":
    import torch, torch.distributed as dist
match sys.argv[2]:
    case "half" if rank % 2 == 0:
        dist.init_process_group("gloo", rank=rank // 2, world_size=2)
        dist.barrier()  # who leaves earlier may end the other one's connection
    case "each alone":
        dist.init_process_group("gloo", rank=0, world_size=1)
    case "three, and no Gloo" if rank < 3:  # as a rank with NCCL comes to the store
        dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 4, False)
open(f"{sys.argv[1]}/seen-{rank}.json", "w").write("1")
os._exit(0)
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("launcher", "who", "largest"),
    [
        ("python", "half", 2),
        pytest.param("torchrun", "half", 2, marks=pytest.mark.slow),
        pytest.param("python", "each alone", 1, marks=pytest.mark.slow),
        pytest.param("python", "three, and no Gloo", 3, marks=pytest.mark.slow),
        pytest.param("python", "nobody", None, marks=pytest.mark.slow),
    ],
)
def test_a_process_group_that_is_smaller_than_the_world(
    launcher: str, who: str, largest: int | None, plan: dict[str, Any], start: Start, tmp_path: Path
) -> None:
    launch(launcher, plan, start, tmp_path, who, script=LONE)
    file = tmp_path / "process_group.json"
    assert (json.loads(file.read_text())["largest"] if file.exists() else None) == largest


@pytest.mark.parametrize("libuv", [True, False])
@pytest.mark.parametrize(
    ("came", "addresses", "largest"),
    [
        (2, (0, 1), 2),  # the program has numbered them itself
        (2, (), 2),  # as with NCCL
        (3, (0,), 1),
        (3, (0, 1, 2), None),
        (0, (), None),
    ],
)
def test_how_many_have_joined(
    libuv: bool, came: int, addresses: tuple[int, ...], largest: int | None, tmp_path: Path
) -> None:
    """By both of torch's servers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    clients = [TCPStore("127.0.0.1", store.port, 3, is_master=False) for _ in range(came)]
    for number in addresses:
        clients[0].set(f"default_pg/0//cpu//0/{number}", b"an address")
    write_process_group(str(tmp_path), 3, ("127.0.0.1", store.port))
    file = tmp_path / "process_group.json"
    assert (json.loads(file.read_text())["largest"] if file.exists() else None) == largest


def test_what_has_the_port_of_a_dead_store_is_not_believed(tmp_path: Path) -> None:
    """It may tell any length."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as line:
                line.sendall(b"\0\1\1\1" + struct.pack("=Q", 1 << 63) + b"x" * 20)
                line.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        write_process_group(str(tmp_path), 3, server.getsockname())
        thread.join()
    assert not (tmp_path / "process_group.json").exists()


def test_nobody_can_tell_without_a_store(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write_process_group(str(tmp_path), 3, ("127.0.0.1", port))
    assert not (tmp_path / "process_group.json").exists()


@pytest.mark.slow
def test_torchrun_s_ranks_start_again_with_a_store_of_their_own(plan, start: Start, tmp_path: Path) -> None:
    """One rank of the second node fails once. And since anybody may write into torch's store, no pickle is read."""
    plan["world"]["max_restarts"] = 2
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pickle\n"
        "def say(what):\n"
        f"    with open({str(tmp_path / 'said')!r}, 'a') as file:\n"
        "        file.write(what + chr(10))\n"
        "def refuse(*_, **__):\n"
        "    say('unpickled')\n"
        "    raise RuntimeError('a pickle was read')\n"
        "pickle.loads = pickle.load = refuse\n"
        "say('armed')\n"
    )
    seen = launch("torchrun", plan, start, tmp_path, "3", PYTHONPATH=str(tmp_path))
    told = json.loads((tmp_path / "rendezvous.json").read_text())
    assert [(one["rank"], one["node"], one["sum"]) for one in seen] == [(0, 0, 4), (1, 0, 4), (2, 1, 4), (3, 1, 4)]
    assert {(one["again"], one["most"]) for one in seen} == {(1, 2)}
    assert len({one["port"] for one in seen} | {str(told["port"])}) == 2
    assert {tuple(one["listening"]) for one in seen} == {("7f000001",)}
    said = (tmp_path / "said").read_text().split()
    assert (set(said), len(said) >= 2 + 2 * (2 + 4)) == ({"armed"}, True)
    records = [json.loads(path.read_text()) for path in (tmp_path / "failures" / "restart-1").iterdir()]
    first = min(records, key=lambda record: record["time"])
    assert (first["rank"], first["code"]) == (3, 9)
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["restart-1"]


@pytest.mark.seconds
def test_one_rank_without_an_agent_has_a_store_when_it_asks_for_it(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    plan["world"] |= {"ranks_per_node": 1, "size": 1}
    (tmp_path / "script.py").write_text(SCRIPT)
    job = launchers.Job(python=sys.executable, folder=str(tmp_path), hosts=("node1",), each=1)
    plan["launcher"] = list(launchers.LAUNCHERS["python"](job).argv)
    plan["command"] = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    node = start(0, 1, "node1", GLOO_SOCKET_IFNAME="lo")
    assert node.wait(60) == 0, (tmp_path / "logs/rank-0.log").read_text()
    assert json.loads((tmp_path / "seen-0.json").read_text())["sum"] == 1


def test_the_installation_registers_the_rendezvous() -> None:
    """torch reads it as it is imported."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    assert "tcp_store.handler.StoreRendezvous" in str(rendezvous_handler_registry._registry["dray"])


@pytest.mark.slow
@pytest.mark.seconds
def test_the_store_outlives_signals() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        argv = [sys.executable, "-m", "dray.tcp_store", "127.0.0.1", str(port), str(listener.fileno())]
        store = subprocess.Popen(argv, pass_fds=[listener.fileno()])
    try:
        limit = datetime.timedelta(minutes=2)
        clients = [TCPStore("127.0.0.1", port, is_master=False, timeout=limit) for _ in range(64)]
        for number in children.STOPS:  # such as all processes get at a stop: ranks agree by the store what they save
            store.send_signal(number)
        assert [client.add("ranks", 1) for client in clients] == list(range(1, 65))
    finally:
        store.kill()
        store.wait()
