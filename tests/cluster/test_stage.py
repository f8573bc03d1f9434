"""The image on the nodes' own disks, by sbcast of the real Slurm."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

NODES = ("n1", "n2")
# Named in a recipe's command: what of the copy is on this node while the run goes on.
LOOK = """
import glob, hashlib, json, os
copies = glob.glob("/tmp/dray-*.sif")
digests = [hashlib.file_digest(open(path, "rb"), "sha256").hexdigest() for path in copies]
modes = [oct(os.stat(path).st_mode & 0o777) for path in copies]
print(json.dumps([os.environ["APPTAINER_CONTAINER"], copies, digests, modes]))
"""
WORDS = ("ranks_per_node=1", "launcher=python", "preflight.when=never", "--", "python3", "-c", LOOK)


@pytest.fixture
def option(cluster) -> Iterator[str]:
    """The option that selects a site file with a folder for copies."""
    site = cluster.shared / "home" / "staged.toml"
    site.write_text('name = "staged"\nabout = "a test"\nstage = "/tmp"\n')
    site.chmod(0o644)
    yield "--export=ALL,DRAY_SITE=/shared/home/staged.toml"
    site.unlink(missing_ok=True)
    for node in NODES:
        cluster.exec(["bash", "-c", "rm -rf /tmp/dray-*.sif"], user="root", node=node)


@pytest.fixture
def left(cluster) -> Callable[[], list[str]]:
    """The copies on each node."""
    return lambda: [cluster.exec(["bash", "-c", "ls /tmp/dray-*.sif 2>/dev/null"], node=node).out for node in NODES]


def seen(attempt: Path) -> list[tuple[str, list[str], list[str], list[str]]]:
    """By rank, one on each node."""
    return [json.loads((attempt / "logs" / f"rank-{rank}.log").read_text().splitlines()[-1]) for rank in (0, 1)]


def test_each_node_has_one_copy_which_goes_at_the_end(sbatch, root: Path, option: str, left) -> None:
    ended = sbatch(option, f"{root}/slurm/multinode.sh", *WORDS)
    assert ended.code == 0, ended.output
    plan = json.loads((ended.attempt / "plan.json").read_text())
    assert re.fullmatch(r"/tmp/dray-\d+-[0-9a-f]{32}\.sif", plan["stage"])
    for node in seen(ended.attempt):
        assert node == [plan["stage"], [plan["stage"]], [plan["image_sha256"]], ["0o600"]]
    assert "image: sbcast has copied it to 2 nodes in " in ended.output
    assert left() == ["", ""]


@pytest.mark.slow
def test_a_spare_node_keeps_no_copy(sbatch, root: Path, option: str, left) -> None:
    ended = sbatch(option, f"{root}/slurm/multinode.sh", "spares=1", *WORDS)
    assert ended.code == 0, ended.output
    assert "image: sbcast has copied it to 2 nodes in " in ended.output
    assert left() == ["", ""]


# As the real one, but for some bytes of the file that it brings.
FLIPS = """#!/bin/bash
cp -- "$1" "$HOME/flipped" &&
  printf '\\xff\\x00\\xff' | dd of="$HOME/flipped" bs=1 seek=1000000 conv=notrunc status=none
/usr/bin/sbcast "$HOME/flipped" "$2"
code=$?
rm -f -- "$HOME/flipped"
exit "$code"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "output", "log"),
    [
        (FLIPS, "image: sbcast has copied it to 2 nodes in ", ", has another digest, "),
        ("#!/bin/bash\necho full >&2\nexit 1\n",
         "image: nodes without a whole copy read the shared file: sbcast ended with 1: full\n", ", is not there\n"),
    ],
)  # fmt: skip
def test_without_a_right_copy_the_nodes_read_the_shared_file(
    cluster, sbatch, root: Path, option: str, left, script: str, output: str, log: str
) -> None:
    tool = cluster.shared / "home" / "tools" / "sbcast"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(script)
    tool.chmod(0o755)
    tool.parent.chmod(0o755)
    path = "PATH=/shared/home/tools:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    ended = sbatch(f"{option},{path}", f"{root}/slurm/multinode.sh", *WORDS)
    assert ended.code == 0, ended.output
    assert output in ended.output
    for number in (0, 1):
        text = (ended.attempt / "logs" / f"node-{number}.log").read_text()
        assert "dray: the image is read from the shared file: the copy on this node, /tmp/dray-" in text
        assert log in text
    assert not any(starts.startswith("/tmp/") for starts, *_ in seen(ended.attempt))
    assert left() == ["", ""]


@pytest.mark.slow
def test_sbcast_follows_no_link_and_writes_over_no_file(cluster, sbatch, option: str) -> None:
    """dray relies on it: without --force it creates the file, or it fails."""
    home = "/shared/home"
    cluster.exec(["bash", "-c", f"echo mine >{home}/precious; ln -s {home}/precious /tmp/dray-link.sif"], node="n1")
    script = cluster.shared / "home" / "sbcast.sh"
    script.write_text(f"#!/bin/bash\nsbcast {home}/sbcast.sh /tmp/dray-link.sif\n")
    script.chmod(0o755)
    ended = sbatch("--nodes=1", "--nodelist=n1", f"{home}/sbcast.sh")
    assert ended.code != 0
    assert cluster.exec(["cat", f"{home}/precious"]).out == "mine\n"
