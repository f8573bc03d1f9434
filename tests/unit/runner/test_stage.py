"""The image on the nodes' disks by Slurm's sbcast: the real bash of the batch script and of the tasks; Slurm is not."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from copies import decided as made_of
from dray import render
from helpers import ROOT, golden

IMAGE = os.urandom(70_000)
SHA256 = hashlib.sha256(IMAGE).hexdigest()
NODES = ("n1", "n2", "n3")
# A task on each node, whose disk is a folder of its own here; each hears every line, as srun's do.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, threading, time
disk, text = os.environ["DISK"], open(sys.argv[-1]).read()
open("srun", "w").write("\\n".join(sys.argv[1:]))
if os.environ.get("SRUN") == "hangs":  # a task that no signal ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if os.environ.get("SRUN") == "fails":
    sys.exit("srun: error: Unable to create step")
tasks = []
for name in {NODES!r}:
    own = text.replace(disk, f"{{disk}}-{{name}}")
    env = os.environ | {{"PATH": f"{{disk}}-{{name}}/bin:" + os.environ["PATH"]}}
    pipes = {{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}}
    tasks.append(subprocess.Popen(["bash", "-c", own], env=env, **pipes))
def told(task, name):
    for line in task.stdout:
        os.write(1, line.replace(f"{{disk}}-{{name}}", disk).encode())
threads = [threading.Thread(target=told, args=one) for one in zip(tasks, {NODES!r})]
for one in threads:
    one.start()
for line in sys.stdin:
    for task in tasks:
        task.stdin.write(line)
        task.stdin.flush()
for task in tasks:
    task.stdin.close()
for one in threads:
    one.join()
"""
SBCAST = f"""#!{sys.executable}
import os, sys, time
open("sbcast", "w").write("\\n".join(sys.argv[1:]))
source, part = sys.argv[1:]
data, harm = open(source, "rb").read(), os.environ.get("SBCAST", "")
if harm == "waits":
    time.sleep(600)
for name in {NODES!r}:
    if harm == f"fails at {{name}}":
        sys.exit("sbcast: error: REQUEST_FILE_BCAST(n2): No space left on device")
    flipped = data[:999] + bytes([data[999] ^ 1]) + data[1000:] if harm == f"flips at {{name}}" else data
    open(part.replace(os.environ["DISK"], os.environ["DISK"] + "-" + name), "xb").write(flipped)
"""


decided = partial(made_of, sha256=SHA256)


class Nodes:
    """A job of three nodes, before they start."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.image, self.attempt, self.bin = (folder / name for name in ("disk", "my image.sif", "a", "bin"))
        for path in (self.attempt / "logs", self.bin, *(self.of(name) for name in NODES)):
            path.mkdir(parents=True)
        self.image.write_bytes(IMAGE)
        self.text = (ROOT / "slurm" / "stage.sh").read_text()
        self.tool("srun", SRUN)
        self.tool("sbcast", SBCAST)
        (self.attempt / "stage.sh").write_text(render.stage_script(decided(self.disk, self.image)))

    def tool(self, name: str, script: str, folder: Path | None = None) -> None:
        path = (folder or self.bin) / name
        path.write_text(script)
        path.chmod(0o755)

    def of(self, name: str) -> Path:
        return Path(f"{self.disk}-{name}", f"dray-images-{os.getuid()}").parent

    def folder(self, name: str) -> Path:
        return self.of(name) / f"dray-images-{os.getuid()}"

    def copy(self, name: str) -> Path:
        return self.folder(name) / f"{SHA256}.sif"

    def begin(self, **env: str) -> subprocess.Popen[str]:
        script = """set -euo pipefail; shopt -s extglob
            image="$2" stopped_by="" lib__task=task attempt="$PWD"; source /dev/stdin <<<"$3"
            trap 'stopped_by=TERM' TERM; stage::nodes; echo "on${stopped_by:+ $stopped_by}" """
        return subprocess.Popen(
            ["bash", "-c", script, "job", ROOT, self.image, self.text],
            env={"PATH": f"{self.bin}:/usr/bin:/bin", "DISK": str(self.disk), "SLURM_JOB_NUM_NODES": "3", **env},
            cwd=self.attempt, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def bring(self, **env: str) -> list[str]:
        """The lines in the job's output."""
        with self.begin(**env) as job:
            out, err = job.communicate(timeout=120)
        assert (job.returncode, err) == (0, "")
        *lines, last = out.splitlines()
        assert last == "on"
        return lines

    def left(self) -> dict[str, list[str]]:
        """The files on each node's disk, but for the locks."""
        return {
            name: sorted(path.name for path in self.folder(name).glob("*") if path.suffix not in (".lock", ".making"))
            for name in NODES
        }

    def log(self) -> str:
        return (self.attempt / "logs" / "stage.log").read_text()


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


ALL, NONE = {name: [f"{SHA256}.sif"] for name in NODES}, {name: [] for name in NODES}


def test_the_scripts() -> None:
    """What a task runs while sbcast copies, and what a node runs then."""
    known = decided(Path("/local disk"), Path("/my images/i.sif"), sha256="5ec2e7" * 10 + "0000")
    golden("stage.sh", render.stage_script(known))
    golden("node-stage.sh", render.node_script(known))


SLURM, TREE, COPY = "Slurm's sbcast", "from node to node, in a tree", "each node copies the shared file"


@pytest.mark.parametrize(
    ("changed", "ways"),
    [
        ({}, (SLURM, TREE)),
        ({"by": "sbcast"}, (SLURM,)),
        ({"by": "tree"}, (TREE,)),
        ({"by": "copy"}, ()),
        ({"nodes": 1}, ()),
        ({"signers": ("A" * 40,)}, (SLURM,)),
        ({"sha256": ""}, ()),
        ({"lost": ("n3",)}, (TREE,)),
        ({"spares": ("n3",)}, (TREE,)),
        ({"scheduler": "hosts", "nodelist": "n1,n2,n3"}, ()),
    ],
)
def test_what_is_tried(changed: dict, ways: tuple[str, ...]) -> None:
    """Without a digest no copy could be proved. Machines of a file have no Slurm, and share no folder. The
    tree's program is in the image, and would start before its signature is checked."""
    made = decided(Path("/tmp"), Path("/i.sif"), **changed)
    assert made.reasons["stage"] == f"copied to /tmp of each node: {', else '.join((*ways, COPY))}"
    assert f"\n  stage   {made.reasons['stage']}\n" in render.text(made)
    assert bool(render.stage_script(made)) == (SLURM in ways)
    assert ("node::fetch() {" in render.node_script(made)) == (TREE in ways)


def test_each_node_gets_one_copy(nodes: Nodes) -> None:
    (line,) = nodes.bring()
    assert re.fullmatch(r"image: sbcast has copied it to 3 nodes in \d+ s", line)
    assert nodes.left() == ALL
    for name in NODES:
        assert nodes.copy(name).read_bytes() == IMAGE
        assert (nodes.folder(name).stat().st_mode & 0o777, nodes.copy(name).stat().st_mode & 0o777) == (0o700, 0o600)
    part = f"{nodes.disk}/dray-images-{os.getuid()}/{SHA256}.sif.part"
    assert (nodes.attempt / "sbcast").read_text().splitlines() == [str(nodes.image), part]
    assert (nodes.attempt / "srun").read_text().splitlines() == [
        "--overlap", "--export=ALL", "--wait=0", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpu-bind=none",
        "bash", "-c", "task", str(nodes.attempt), "./stage.sh",
    ]  # fmt: skip


def test_a_node_then_starts_the_copy_and_reads_no_shared_file(nodes: Nodes, tmp_path: Path) -> None:
    nodes.bring()
    known = decided(nodes.of("n2"), tmp_path / "my image.sif")
    nodes.tool("apptainer", '#!/bin/bash\nfor word; do [[ "$word" != *.sif ]] || echo "$word"; done\n')
    (tmp_path / "r" / "attempt-1" / "failures").mkdir(parents=True)
    script = render.node_script(known).replace("/runs/r", str(tmp_path / "r"))
    nodes.image.write_bytes(b"another, of which nobody takes the digest" * 9)
    ended = subprocess.run(
        ["bash", "-c", script], env={"PATH": f"{nodes.bin}:/usr/bin:/bin", "SLURM_NODEID": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{nodes.copy('n2')}\n", "")
    assert list(nodes.folder("n2").iterdir()) == []  # the last job takes it away


def test_nodes_that_have_it_all_are_left_alone(nodes: Nodes) -> None:
    nodes.bring()
    (nodes.attempt / "sbcast").unlink()
    assert nodes.bring() == []
    assert not (nodes.attempt / "sbcast").exists()


@pytest.mark.parametrize("harm", ["flips at n2", "fails at n2"])
def test_what_does_not_arrive_whole_is_no_copy(nodes: Nodes, harm: str) -> None:
    flipped = harm.startswith("flips")
    assert nodes.bring(SBCAST=harm) == [
        "image: not copied by sbcast: after sbcast 2 of 3 nodes have the image, 1 of 3 nodes got another file; see "
        "logs/stage.log" if flipped else "image: not copied by sbcast: sbcast ended with 1: sbcast: error: "
        "REQUEST_FILE_BCAST(n2): No space left on device; see logs/stage.log"
    ]  # fmt: skip
    assert nodes.left() == ({**ALL, "n2": []} if flipped else NONE)
    assert flipped == nodes.log().startswith(
        f"dray: the copy of the image differs from the image\n  where:  {nodes.copy('n2')}\n  wanted: {SHA256}\n"
    )


def _link(nodes: Nodes) -> None:
    (nodes.of("n2") / "mine").mkdir()
    nodes.folder("n2").symlink_to("mine")


def _file(nodes: Nodes) -> None:
    nodes.folder("n2").touch()


def _foreign(nodes: Nodes) -> None:
    nodes.folder("n2").mkdir(mode=0o777)
    os.chown(nodes.folder("n2"), 4321, 4321)


def _full(nodes: Nodes) -> None:
    (nodes.of("n2") / "bin").mkdir()
    nodes.tool("df", "#!/bin/sh\necho Avail\necho 69999\n", nodes.of("n2") / "bin")


def _there(nodes: Nodes) -> None:
    nodes.folder("n2").mkdir()
    nodes.copy("n2").touch()


@pytest.mark.parametrize(
    ("made", "says", "log"),
    [
        (_link, "have no folder for it", "  found:  symbolic link of user {uid}\n"),
        (_file, "have no folder for it", "  found:  regular empty file of user {uid}\n"),
        pytest.param(
            _foreign, "have no folder for it", "  found:  directory of user 4321\n",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="root makes another user's folder"),
        ),
        (_full, "have no room for it", ""),
        (_there, "have the image", ""),
    ],
)  # fmt: skip
def test_one_node_that_cannot_take_it(nodes: Nodes, made, says: str, log: str) -> None:
    """sbcast copies to all nodes or none, and there is never a second copy on one; node.sh brings it to the others."""
    made(nodes)
    assert nodes.bring() == [f"image: not copied by sbcast: 1 of 3 nodes {says}; see logs/stage.log"]
    assert not (nodes.attempt / "sbcast").exists()
    assert nodes.left()["n1"] == []
    assert (log.format(uid=os.getuid()) in nodes.log()) if log else not nodes.log()


def test_another_job_is_making_the_copy(nodes: Nodes) -> None:
    nodes.folder("n3").mkdir()
    with nodes.copy("n3").with_name(f"{SHA256}.sif.making").open("a") as making:
        fcntl.flock(making, fcntl.LOCK_EX)
        assert nodes.bring() == [
            "image: not copied by sbcast: 1 of 3 nodes are getting it for another job; see logs/stage.log"
        ]
    assert nodes.left() == NONE
    assert len(nodes.bring()) == 1
    assert nodes.left() == ALL


def test_what_a_killed_job_left_is_in_nobodys_way(nodes: Nodes) -> None:
    nodes.folder("n1").mkdir(mode=0o755)
    Path(f"{nodes.copy('n1')}.part").write_text("half")
    nodes.bring()
    assert nodes.left() == ALL
    assert nodes.copy("n1").read_bytes() == IMAGE


def test_without_sbcast_or_a_step(nodes: Nodes) -> None:
    assert nodes.bring(SRUN="fails") == ["image: not copied by sbcast: not all nodes answered; see logs/stage.log"]
    assert nodes.log() == "srun: error: Unable to create step\n"
    (nodes.bin / "sbcast").unlink()
    where = os.uname().nodename
    assert nodes.bring() == [f"image: not copied by sbcast: sbcast is not on the PATH of node {where}"]
    (nodes.attempt / "stage.sh").unlink()
    assert nodes.bring() == []


@pytest.mark.seconds
def test_a_task_that_nothing_ends_is_not_waited_for(nodes: Nodes) -> None:
    nodes.text = re.sub(r"(stage__(?:answer|end)_s)=\d+", r"\1=1", nodes.text)
    assert nodes.bring(SRUN="hangs") == ["image: not copied by sbcast: not all nodes answered; see logs/stage.log"]


def test_it_is_done_in_the_attempt_s_folder_before_the_nodes_start(nodes: Nodes) -> None:
    script = """set -euo pipefail; shopt -s extglob; source "$DRAY_HOME/slurm/lib.sh"; attempt="$PWD"; cd /
        stopped_by="" stopped_at="" late="" nodes_pid="" began_at=""; srun() { echo "$*" >>order; }; tail() { :; }
        stage::nodes() { echo "stage::nodes" >>order; }; end::finish() { echo "end::finish $1" >>order; }; lib::start"""
    env = {"PATH": "/usr/bin:/bin", "DRAY_HOME": str(ROOT), "SLURM_JOB_NUM_NODES": "3"}
    subprocess.run(["bash", "-c", script], env=env, cwd=nodes.attempt, check=True)
    first, second, *_, last = (nodes.attempt / "order").read_text().splitlines()
    words = (nodes.attempt / "order").read_text().partition("end::finish")[0].split()
    assert (first, second.split()[0], words[-1], last) == ("stage::nodes", "--overlap", "./node.sh", "end::finish 0")


def test_a_signal_ends_it_at_once(nodes: Nodes) -> None:
    with nodes.begin(SBCAST="waits") as job:
        deadline = time.monotonic() + 60
        while not (nodes.attempt / "sbcast").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=60)
    assert (out.splitlines()[-1], err) == ("on TERM", "")
    assert nodes.left() == NONE


@pytest.mark.shellcheck
@pytest.mark.parametrize("script", [render.stage_script, render.node_script])
def test_shellcheck(script) -> None:
    text = script(decided(Path("/dev/shm"), Path("/i.sif")))
    checked = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
    assert checked.stdout == ""
