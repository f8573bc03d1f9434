"""The image on the nodes' disks by Slurm's sbcast: the real bash of the batch script and of node.sh; Slurm is not."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from copies import decided
from dray import render
from helpers import ROOT, golden

IMAGE = bytes(range(256)) * 280
SHA256 = hashlib.sha256(IMAGE).hexdigest()


def test_the_node_s_script() -> None:
    known = decided("/local disk", Path("/my images/i.sif"), sha256="5ec2e7" * 10 + "0000")
    golden("node-staged.sh", render.node_script(known))


TAKES = "not copied to the nodes: it takes Slurm's sbcast, and an engine that can start a copy"


@pytest.mark.parametrize(
    ("changed", "copy", "why"),
    [
        ({}, "/tmp/dray-7-r.sif", "copied by sbcast to /tmp/dray-7-r.sif of each node, else read from the shared file"),
        ({"signers": ("A" * 40,)}, "/tmp/dray-7-r.sif", None),
        ({"spares": ("n4",)}, "/tmp/dray-7-r.sif", None),
        ({"sha256": ""}, "", "not copied to the nodes: /i.sif.json, whose digest proves a copy, is missing"),
        ({"lost": ("n4",)}, "", "not copied to the nodes: sbcast fails once the job has lost a node"),
        ({"scheduler": "hosts", "nodelist": "n1,n2,n3"}, "", TAKES),
        ({"engine": "podman-hpc"}, "", TAKES),
        ({"engine": "pyxis"}, "", TAKES),
        ({"disk": "off"}, "", ""),
    ],
)
def test_when_the_image_is_copied(changed: dict, copy: str, why: str | None) -> None:
    """Without a digest no copy could be proved, and sbcast fails at a node that is lost."""
    made = decided(**{"disk": "/tmp", "image": Path("/i.sif"), "sha256": SHA256, **changed})
    assert made.stage == copy
    assert ("node::stage /i.sif" in render.node_script(made)) == bool(copy)
    if why is not None:
        assert made.reasons.get("stage", "") == why
    assert (f"\n  stage   {made.reasons.get('stage')}\n" in render.text(made)) == ("stage" in made.reasons)


class Node:
    """A node, whose Apptainer says which image it was to start, and does what it is told."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.image, self.folder = folder / "disk", folder / "my image.sif", folder
        for path in (self.disk, folder / "bin", folder / "run/attempt-1/failures"):
            path.mkdir(parents=True)
        self.image.write_bytes(IMAGE)
        self.scratch = f"/tmp/dray-{os.getuid()}-{folder.name}-{os.getpid()}"  # what has it in its environment is ended
        tool = folder / "bin" / "apptainer"
        tool.write_text('#!/bin/bash\nfor word; do [[ "$word" != *.sif ]] || echo "$word"; done\neval "$DO"\n')
        tool.chmod(0o755)

    @property
    def copy(self) -> Path:
        return self.disk / f"{Path(self.scratch).name}.sif"

    def run(self, do: str = "") -> subprocess.CompletedProcess[str]:
        made = decided(self.disk, self.image, sha256=SHA256, run=self.folder / "run", scratch=self.scratch)
        assert made.stage == str(self.copy)
        return subprocess.run(
            ["bash", "-c", render.node_script(made)],
            env={"PATH": f"{self.folder}/bin:/usr/bin:/bin", "DO": do, "SLURM_NODEID": "1"},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("code", [0, 7])
def test_a_node_starts_its_copy_and_removes_it(node: Node, code: int) -> None:
    node.copy.write_bytes(IMAGE)
    node.copy.chmod(0o664)
    ended = node.run(f"stat --format=%a {shlex.quote(str(node.copy))}; exit {code}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, f"{node.copy}\n600\n", "")
    assert list(node.disk.iterdir()) == []


def _nothing(node: Node) -> None:
    assert not node.copy.exists()


def _link(node: Node) -> None:
    (node.folder / "theirs").write_bytes(IMAGE)
    node.copy.symlink_to(node.folder / "theirs")


def _folder(node: Node) -> None:
    node.copy.mkdir()


def _half(node: Node) -> None:
    node.copy.write_bytes(IMAGE[:999])


def _changed(node: Node) -> None:
    node.copy.write_bytes(IMAGE[::-1])


def _open(node: Node) -> None:
    node.copy.write_bytes(IMAGE)
    node.disk.chmod(0o777)


def _theirs(node: Node) -> None:
    node.copy.write_bytes(IMAGE)
    os.chown(node.copy, 4321, 4321)


def _their_folder(node: Node) -> None:
    node.copy.write_bytes(IMAGE)
    os.chown(node.disk, 4321, 4321)


ROOTS = pytest.mark.skipif(os.geteuid() != 0, reason="root makes another user's file")


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (_nothing, "is not there"),
        (_link, "is not there"),
        (_folder, "is not there"),
        (_half, f"has another digest, {hashlib.sha256(IMAGE[:999]).hexdigest()}"),
        (_changed, f"has another digest, {hashlib.sha256(IMAGE[::-1]).hexdigest()}"),
        (_open, "could be changed by another user"),
        pytest.param(_theirs, "could be changed by another user", marks=ROOTS),
        pytest.param(_their_folder, "could be changed by another user", marks=ROOTS),
    ],
)
@pytest.mark.hostile("node")
def test_else_it_starts_the_shared_image_and_says_why(node: Node, harm: Callable[[Node], None], why: str) -> None:
    """And what filled the disk is gone, before the node is checked for room."""
    harm(node)
    ended = node.run(f"ls -A {shlex.quote(str(node.disk))}")
    told = f"dray: the image is read from the shared file: the copy on this node, {node.copy}, {why}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{node.image}\n", told)
    assert node.image.read_bytes() == IMAGE


def test_it_removes_what_killed_jobs_have_left(node: Node) -> None:
    """A run that has started holds its copy open, and one that is about to start has a young one."""
    node.copy.write_bytes(IMAGE)
    mine, minutes = f"dray-{os.getuid()}", {"-old.sif": 70, "-young.sif": 50, "9-old.sif": 70, "-old": 70}
    for name, age in minutes.items():
        (node.disk / f"{mine}{name}").touch()
        os.utime(node.disk / f"{mine}{name}", (time.time() - age * 60,) * 2)
    (node.disk / f"{mine}-folder.sif").mkdir()
    os.utime(node.disk / f"{mine}-folder.sif", (0, 0))
    assert node.run().stdout == f"{node.copy}\n"
    kept = {path.name.removeprefix(mine) for path in node.disk.iterdir()}
    assert kept == {"-young.sif", "9-old.sif", "-old", "-folder.sif"}


def test_tmp_is_a_folder_for_copies(node: Node) -> None:
    """Everybody may write there, and with the sticky bit nobody exchanges what is another's."""
    node.disk.chmod(0o1777)
    node.copy.write_bytes(IMAGE)
    assert node.run().stdout == f"{node.copy}\n"


JOB = """set -euo pipefail; shopt -s extglob; source "$DRAY_HOME/slurm/job.sh"
image="$1" stage="$2" spares="$3" stopped_by=""; trap 'stopped_by=TERM' TERM
job::stage; echo "on${stopped_by:+ $stopped_by}" """
CALL = '#!/bin/bash\nprintf "%s\\n" "${0##*/}" "$@" >>calls\n'


class Batch:
    """The batch script in the attempt's folder, before the nodes start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", "logs"):
            (folder / name).mkdir()
        self.tool("srun", CALL)
        self.tool("sbcast", CALL)

    def tool(self, name: str, script: str) -> None:
        (self.folder / "bin" / name).write_text(script)
        (self.folder / "bin" / name).chmod(0o755)

    def begin(self, spares: str = "", stage: str = "/local/dray-7-r.sif") -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", JOB, "job", "/my images/i.sif", stage, spares],
            env={"PATH": f"{self.folder}/bin:/usr/bin:/bin", "DRAY_HOME": str(ROOT), "SLURM_JOB_NUM_NODES": "3"},
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def lines(self, *given: str) -> list[str]:
        """The lines in the job's output."""
        with self.begin(*given) as job:
            out, err = job.communicate(timeout=60)
        assert (job.returncode, err) == (0, "")
        *lines, last = out.splitlines()
        assert last == "on"
        return lines

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def test_one_command_copies_it_to_all_nodes(batch: Batch) -> None:
    """Without --force: it creates the file, or it fails, and follows no link that somebody has planted."""
    (line,) = batch.lines()
    assert re.fullmatch(r"image: sbcast has copied it to 3 nodes in \d+ s", line)
    assert batch.calls() == ["sbcast", "/my images/i.sif", "/local/dray-7-r.sif"]


def test_a_spare_node_keeps_none(batch: Batch) -> None:
    """No node.sh runs there. One that takes another's place later reads the shared image. The start waits for none."""
    batch.tool("srun", f"#!/bin/bash\nuntil [[ -e go ]]; do sleep 0.1; done\n{CALL}")
    batch.lines("n3,n4")
    (batch.folder / "go").touch()
    deadline = time.monotonic() + 60
    while len(batch.calls()) < 15 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert batch.calls()[3:] == [
        "srun", "--overlap", "--export=ALL", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpu-bind=none",
        "--nodelist=n3,n4", "rm", "--force", "--", "/local/dray-7-r.sif",
    ]  # fmt: skip


def test_where_it_fails_the_nodes_read_the_shared_file(batch: Batch) -> None:
    error = "sbcast: error: REQUEST_FILE_BCAST(n2): No space left on device"
    batch.tool("sbcast", f"#!/bin/bash\necho '{error}' >&2\nexit 1\n")
    assert batch.lines() == [f"image: nodes without a whole copy read the shared file: sbcast ended with 1: {error}"]
    (batch.folder / "bin" / "sbcast").unlink()
    (line,) = batch.lines()
    assert line.startswith("image: nodes without a whole copy read the shared file: sbcast ended with 127: timeout: ")


def test_nothing_is_copied_where_the_plan_has_no_copy(batch: Batch) -> None:
    assert batch.lines("", "") == []
    assert not (batch.folder / "calls").exists()


DEAF = "trap '' TERM; exec sleep 30"


@pytest.mark.parametrize(
    ("sbcast", "inner"),
    [("exec sleep 30", ""), (DEAF, ""), ("", f'[[ "$3" != sbcast ]] || {{ {DEAF}; }}')],
    ids=["a slow disk", "it does not hear SIGTERM", "SIGKILL does not end it, nor the timeout that waits for it"],
)
def test_it_has_a_limit(batch: Batch, sbcast: str, inner: str) -> None:
    faster = 'exec /usr/bin/timeout "${1}e-3" "${2}e-3" "${@:3}"'
    batch.tool("timeout", f'#!/bin/bash\necho "$*" >>limits\n{inner}\n{faster}\n')
    batch.tool("sbcast", f"#!/bin/bash\n{sbcast}\n")
    with batch.begin() as job:
        line, last = job.communicate(timeout=20)[0].splitlines()  # bash itself says on stderr what was killed
    assert re.match(r"image: nodes without a whole copy read the shared file: sbcast ended with (124|137): ", line)
    assert (job.returncode, last) == (0, "on")
    own = "timeout --kill-after=10 900 sbcast /my images/i.sif /local/dray-7-r.sif"
    limits = [f"--kill-after=20 920 {own}", own.removeprefix("timeout ")]
    assert (batch.folder / "limits").read_text().splitlines() == limits


@pytest.mark.parametrize("by", ["a signal", "dray stop"])
def test_a_run_that_is_to_end_does_not_wait_for_it(batch: Batch, by: str) -> None:
    (batch.folder / "stop").touch()
    batch.tool("sbcast", "#!/bin/bash\n: >begun\nexec sleep 600\n")
    with batch.begin() as job:
        deadline = time.monotonic() + 60
        while not (batch.folder / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if by == "dray stop":
            (batch.folder / "stop").write_text("dray stop\n")
        else:
            job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=60)
    assert (out.splitlines()[-1], err) == ("on" if by == "dray stop" else "on TERM", "")


def test_it_is_done_in_the_attempt_s_folder_before_the_nodes_start(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    script = """set -euo pipefail; shopt -s extglob; source "$DRAY_HOME/slurm/job.sh"; attempt="$PWD"; cd /
        stopped_by="" stopped_at="" late="" nodes_pid="" began_at=""; srun() { echo "$*" >>order; }; tail() { :; }
        job::stage() { echo "job::stage" >>order; }; end::finish() { echo "end::finish $1" >>order; }; job::start"""
    env = {"PATH": "/usr/bin:/bin", "DRAY_HOME": str(ROOT), "SLURM_JOB_NUM_NODES": "3"}
    subprocess.run(["bash", "-c", script], env=env, cwd=tmp_path, check=True)
    first, second, *_, last = (tmp_path / "order").read_text().splitlines()
    words = (tmp_path / "order").read_text().partition("end::finish")[0].split()
    assert (first, second.split()[0], words[-1], last) == ("job::stage", "--overlap", "./node.sh", "end::finish 0")


@pytest.mark.shellcheck
def test_shellcheck() -> None:
    text = render.node_script(decided("/dev/shm", Path("/i.sif"), sha256=SHA256))
    checked = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
    assert checked.stdout == ""
