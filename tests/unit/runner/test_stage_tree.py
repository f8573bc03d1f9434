"""The image from node to node: real processes on loopback, and the real bash of node.sh; Apptainer is a stand-in."""

from __future__ import annotations

import hashlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from copies import decided
from dray import render
from dray.runner import channel, chunks
from dray.runner import tree as tree_module
from dray.runner.channel import BrokenError, Channel

CHUNK = 4096
IMAGE = os.urandom(20 * CHUNK + 77)
# The program itself, with small chunks; HARM says what goes wrong as it hands on the sixth chunk.
NODE = f"""
import os, sys, time
from dray.runner import chunks, stage, tree
chunks.CHUNK, tree.ABSENT_S = {CHUNK}, float(os.environ.get("ABSENT", "60"))
if "SILENT" in os.environ:
    tree.SILENT_S, tree.NEWS_S = float(os.environ["SILENT"]), 0
push, harm = chunks.push, os.environ.get("HARM", "")
def harmed(line, file, at, length):
    if harm == "is slow":
        time.sleep(0.25)
        push(line, file, at, length)
    elif harm and at == 5 * {CHUNK}:
        if harm == "dies":
            os._exit(9)
        data = bytearray(os.pread(file, length, at))
        data[7] ^= 1
        line.sendall(data)
    else:
        push(line, file, at, length)
chunks.push = harmed
ended = stage.main(sys.argv[1])
sys.stdout.flush()
os._exit(ended)
"""


class Tree:
    """The nodes of a plan, as processes of this machine."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.image = folder, folder / "image"
        self.image.write_bytes(IMAGE)
        world = {
            "nodes": [{"name": f"n{number}", "address": "127.0.0.1"} for number in range(count)],
            "identity": {"node": "NODE", "nodes": "NODES", "name": "NAME"},
            "master": "127.0.0.1", "port": 0, "interfaces": [], "shared_folder": True,
        }  # fmt: skip
        self.plan = folder / "plan.json"
        self.plan.write_text(json.dumps({"folder": str(folder), "attempt": 1, "world": world}))
        (folder / "secret").write_text("5ec2e7" * 8)
        self.count = count
        self.nodes: dict[int, subprocess.Popen[str]] = {}

    def copy(self, node: int) -> Path:
        return self.folder / f"copy-{node}"

    def start(self, *numbers: int, takes: bool = True, before: str = "", plan: Path | None = None, **env: str) -> None:
        for number in numbers:
            own = {"NODE": str(number), "NODES": str(self.count), "NAME": f"n{number}", "PATH": os.environ["PATH"]}
            to = f'1<>"{self.copy(number)}"' if takes else ">/dev/null"
            script = f'{before} exec "$0" -c "$1" "$2" <"{self.image}" {to}'
            self.nodes[number] = subprocess.Popen(
                ["bash", "-c", script, sys.executable, NODE, plan or self.plan], env={**own, **env},
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip

    def has(self, node: int) -> None:
        """Until this node has the first chunk: so it comes before those that start now."""
        deadline = time.monotonic() + 120
        while not self.copy(node).exists() or self.copy(node).read_bytes()[:CHUNK] != IMAGE[:CHUNK]:
            assert time.monotonic() < deadline
            assert self.nodes[node].poll() is None
            time.sleep(0.02)

    def ended(self) -> tuple[dict[int, int], dict[int, str]]:
        """Exit codes, and what each node says."""
        printed = {number: node.communicate(timeout=240)[1] for number, node in self.nodes.items()}
        return {number: node.returncode for number, node in self.nodes.items()}, printed

    def whole(self) -> set[int]:
        return {node for node in self.nodes if self.copy(node).exists() and self.copy(node).read_bytes() == IMAGE}


@pytest.fixture
def tree(tmp_path: Path):
    tree = Tree(tmp_path, 6)
    yield tree
    for node in tree.nodes.values():
        node.kill()
        node.communicate()


def test_all_nodes_get_it_and_the_first_one_reads_it_once(tree: Tree) -> None:
    """All start at once: there is no order in which they must."""
    tree.start(*reversed(range(6)))
    codes, printed = tree.ended()
    assert (codes, set(printed.values())) == (dict.fromkeys(codes, 0), {""})
    assert tree.whole() == set(range(6))


@pytest.mark.parametrize(("harm", "code"), [("dies", 9), pytest.param("flips", 0, marks=pytest.mark.slow)])
def test_a_node_between_that_does_harm(tree: Tree, harm: str, code: int) -> None:
    """Those that get the image from it ask another one, and go on where they were."""
    tree.start(0)
    tree.start(1, HARM=harm)
    tree.has(1)
    tree.start(2, 3, 4, 5)
    codes, printed = tree.ended()
    assert codes == {0: 0, 1: code, 2: 0, 3: 0, 4: 0, 5: 0}
    assert tree.whole() >= {0, 2, 3, 4, 5}
    told = "".join(printed.values())
    assert "did not come from 127.0.0.1: " in told
    assert "asking another node\n" in told
    assert ("chunk 5 was changed on its way" in told) == (harm == "flips")


@pytest.mark.seconds
def test_the_first_node_dies(tree: Tree) -> None:
    tree.start(0, HARM="dies")
    tree.start(1, 2, 3, 4, 5)
    codes, printed = tree.ended()
    assert codes == {0: 9, **dict.fromkeys(range(1, 6), 1)}
    assert all("dray: the image was not copied from node to node: " in printed[node] for node in range(1, 6))
    assert tree.whole() == {0}


@pytest.mark.slow
def test_the_first_node_s_chunks_are_flipped(tree: Tree) -> None:
    """Nobody else has it: each node gives up, by its own exit code."""
    tree.start(0, HARM="flips")
    tree.start(1, 2, 3, 4, 5)
    codes, printed = tree.ended()
    assert codes == {0: 0, **dict.fromkeys(range(1, 6), 1)}
    assert any("chunk 5 was changed on its way" in text for text in printed.values())


@pytest.mark.slow
def test_nodes_that_take_none_or_have_no_room_or_never_come(tree: Tree) -> None:
    tree.start(1, 2)
    tree.start(3, takes=False)
    tree.start(4, before="ulimit -f 8;")
    tree.start(0, takes=False, ABSENT="15")  # last: the others come as soon as it listens
    codes, printed = tree.ended()
    assert codes == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1}
    assert printed == {**dict.fromkeys(range(4), ""), 4: "dray: no room for the image on this node: File too large\n"}
    assert tree.whole() == {1, 2}


@pytest.mark.seconds
def test_a_node_that_is_slow_is_waited_for(tree: Tree) -> None:
    tree.start(0, HARM="is slow", SILENT="3")
    tree.start(1, SILENT="3")
    tree.start(*range(2, 6), takes=False)
    codes, printed = tree.ended()
    assert (codes, set(printed.values())) == (dict.fromkeys(range(6), 0), {""})
    assert tree.whole() == {0, 1}


@pytest.mark.seconds
def test_a_node_that_stands_still_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a disk that hangs: its kernel keeps the connection."""
    monkeypatch.setattr(tree_module, "SILENT_S", 0.3)
    key, limit = b"k" * 32, time.monotonic() + 60
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = tree_module.Tree({"nodes": [{"name": f"n{n}"} for n in range(4)]}, key, listener, ("127.0.0.1", 1))
        served.read.set()
        serving = threading.Thread(target=served.serve, args=(limit,))
        serving.start()
        still, done, goes_on = (
            channel.greet(socket.create_connection(listener.getsockname()), key, limit) for _ in range(3)
        )
        for number, one in enumerate((still, done, goes_on), 1):
            one.send({"node": number, "port": 1000})
            assert "at" in one.receive_one(limit)
        done.send({"have": True})
        while not select.select([still.line], [], [], 0.05)[0]:  # until it is closed
            goes_on.send({"here": 1})
        goes_on.send({"have": True})
        assert [one.receive_one(limit) for one in (done, goes_on)] == [{"over": True}] * 2
        serving.join()
        for line in (still.line, done.line, goes_on.line, *served._links):
            line.close()
    assert capsys.readouterr().out == "dray: n1 got no more of the image for 0 s: nobody waits for it now\n"


@pytest.mark.slow
def test_another_run_s_node_and_strangers_are_no_part_of_it(tree: Tree, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "plan.json").write_text(tree.plan.read_text().replace(str(tmp_path), str(other)))
    (other / "secret").write_text("another" * 8)
    tree.start(0)
    tree.start(1)
    tree.has(1)
    at = json.loads((tmp_path / "stage.json").read_text())
    (other / "stage.json").write_text(json.dumps(at))
    with ExitStack() as stack:
        for number in range(40):
            line = stack.enter_context(socket.create_connection((at["address"], at["port"])))
            line.sendall((b"", b"x" * 64, os.urandom(9000))[number % 3])
        tree.start(5, plan=other / "plan.json")
        stranger = tree.nodes.pop(5)
        assert stranger.stderr
        assert "does not have this run's secret" in stranger.stderr.readline()
        stranger.kill()  # it would try for a minute
        stranger.communicate()
        tree.start(2, 3, 4, 5)
        codes, _ = tree.ended()
    assert codes == dict.fromkeys(range(6), 0)
    assert tree.whole() == set(range(6))


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, two = socket.socketpair()
    with one, two:
        yield Channel(one), Channel(two)


def head(number: int, length: int, data: bytes) -> bytes:
    return chunks._HEAD.pack(number, length, hashlib.sha256(data).digest())


@pytest.mark.parametrize(
    ("sends", "why"),
    [
        (lambda: head(1, 77, b"x" * 77), "out of order"),
        (lambda: head(0, 78, b"x" * 78), "has the wrong length"),
        (lambda: head(0, 1 << 31, b""), "has the wrong length"),
        (lambda: head(0, 77, b"x" * 77) + b"y" * 77, "chunk 0 was changed on its way"),
        (lambda: head(0, 77, b"x" * 77) + b"x" * 76, "the other end closed the connection"),
        (lambda: b"", "the other end closed the connection"),
    ],
)  # fmt: skip
def test_what_is_no_chunk(tmp_path: Path, pair, sends, why: str) -> None:
    here, there = pair
    here.line.sendall(sends())
    here.line.shutdown(socket.SHUT_WR)
    with (tmp_path / "copy").open("w+b") as copy, pytest.raises(BrokenError, match=why):
        chunks.fetch(there, chunks.File(copy.fileno(), 77), time.monotonic() + 60)
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_peer_that_only_waits_has_its_time(tmp_path: Path, pair, monkeypatch) -> None:
    monkeypatch.setattr(chunks, "STALLED_S", -1.0)
    here, there = pair
    here.line.sendall(head(0, 0, b""))
    with (tmp_path / "copy").open("w+b") as copy, pytest.raises(chunks.StalledError, match="no chunk arrived in"):
        chunks.fetch(there, chunks.File(copy.fileno(), 77), time.monotonic() + 60)


APPTAINER = """#!/bin/bash
for name in "${!APPTAINERENV_@}"; do export "${name#APPTAINERENV_}=${!name}"; done
if [[ "$*" == *"-m dray.runner.stage"* ]]; then
  printf '%s\\n' "$@" >"$LOG"
  exec "$PYTHON" -m dray.runner.stage "${@: -1}"
fi
for word; do [[ "$word" != *.sif ]] || { echo "$word"; sha256sum <"$word"; }; done
"""


class Scripts:
    """node.sh of three nodes, each with a disk of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disk, self.image = folder, folder / "disk", folder / "my image.sif"
        self.attempt = folder / "r" / "attempt-1"
        for path in (self.attempt / "failures", folder / "bin"):
            path.mkdir(parents=True)
        self.image.write_bytes(IMAGE)
        (folder / "bin" / "apptainer").write_text(APPTAINER)
        (folder / "bin" / "apptainer").chmod(0o755)
        self.digest = hashlib.sha256(IMAGE).hexdigest()
        made = decided(self.disk, self.image, by="tree", sha256=self.digest, address="127.0.0.1")
        (self.attempt / "plan.json").write_text(made.model_dump_json().replace("/runs/r", f"{folder}/r"))
        (self.attempt / "secret").write_text("5ec2e7" * 8)
        self.script = render.node_script(made).replace("/runs/r", f"{folder}/r")

    def of(self, node: int) -> Path:
        return Path(f"{self.disk}-{node}", f"dray-images-{os.getuid()}")

    def run(self, **env: str) -> list[tuple[int, str, str]]:
        nodes = []
        for number in range(3):
            own = {
                "PATH": f"{self.folder}/bin:/usr/bin:/bin", "PYTHON": sys.executable, "SLURM_NODEID": str(number),
                "SLURM_STEP_NUM_NODES": "3", "SLURMD_NODENAME": f"n{number + 1}", "LOG": f"{self.folder}/log-{number}",
            }  # fmt: skip
            script = self.script.replace(str(self.disk), f"{self.disk}-{number}")
            script = script.replace("/tmp/dray-7-r", f"{self.folder}/own-{number}")
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            nodes.append(subprocess.Popen(["bash", "-c", script], env={**own, **env}, text=True, **pipes))
        outs = [node.communicate(timeout=240) for node in nodes]
        return [(node.returncode, *out) for node, out in zip(nodes, outs, strict=True)]


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def test_each_node_starts_its_copy_which_goes_at_the_end(scripts: Scripts) -> None:
    for number, node in enumerate(scripts.run()):
        copy = scripts.of(number) / f"{scripts.digest}.sif"
        assert node == (0, f"{copy}\n{scripts.digest}  -\n", "")
        assert list(scripts.of(number).iterdir()) == []
        argv = (scripts.folder / f"log-{number}").read_text().splitlines()
        assert argv[-5:] == [
            str(scripts.image), "python3", "-m", "dray.runner.stage", f"{scripts.attempt}/plan.json"
        ]  # fmt: skip
        assert "5ec2e7" not in " ".join(argv)


def test_a_node_with_anothers_folder_reads_the_shared_file_and_the_others_do_not_wait(scripts: Scripts) -> None:
    scripts.of(1).parent.mkdir()
    scripts.of(1).symlink_to("somewhere")
    first, second, third = scripts.run()
    assert (first[0], second[0], third[0]) == (0, 0, 0)
    assert second[1] == f"{scripts.image}\n{scripts.digest}  -\n"
    assert f"  where:  {scripts.of(1)}\n" in second[2]
    assert [node[1] for node in (first, third)] == [
        f"{scripts.of(number)}/{scripts.digest}.sif\n{scripts.digest}  -\n" for number in (0, 2)
    ]


def test_where_all_have_it_by_sbcast_no_tree_grows(scripts: Scripts) -> None:
    for number in range(3):
        scripts.of(number).mkdir(parents=True)
        (scripts.of(number) / f"{scripts.digest}.sif").write_bytes(IMAGE)
    assert [node[0] for node in scripts.run(DRAY_STAGED="1")] == [0, 0, 0]
    assert not (scripts.folder / "log-0").exists()


def test_an_image_that_differs_from_its_record_is_not_started(scripts: Scripts) -> None:
    scripts.image.write_bytes(IMAGE[:-1] + bytes([IMAGE[-1] ^ 1]))
    for code, out, err in scripts.run():
        assert (code, out) == (69, "")
        assert err.count("dray: the copy of the image differs from the image\n") == 2  # by the tree, and by a copy
