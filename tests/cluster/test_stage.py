"""The image on the nodes' own disks, on the real Slurm: by sbcast, in a tree, or by a copy of each node's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

QUICK = ("ranks_per_node=1", "train.steps=4", "train.warmup_steps=0", "train.log_every=1", "preflight.when=never")
NODES = ("n1", "n2")
# Named in a recipe's command: what of the copy is on this node while the run goes on.
LOOK = """
import glob, hashlib, json, os
copies = [path for path in glob.glob("/tmp/dray-images-*/*") if path.endswith((".sif", ".part"))]
digests = [hashlib.file_digest(open(path, "rb"), "sha256").hexdigest() for path in copies]
modes = sorted({oct(os.stat(path).st_mode & 0o777) for path in (*copies, *map(os.path.dirname, copies))})
print(json.dumps([os.environ["APPTAINER_CONTAINER"], copies, digests, modes]))
"""


@pytest.fixture
def at(cluster) -> Iterator[Callable[[str], str]]:
    """The option that selects a site file with this way."""
    site = cluster.shared / "home" / "staged.toml"

    def write(by: str) -> str:
        site.write_text(f'name = "staged"\nabout = "a test"\nstage = "/tmp"\nstage_by = "{by}"\n')
        site.chmod(0o644)
        return "--export=ALL,DRAY_SITE=/shared/home/staged.toml"

    yield write
    site.unlink(missing_ok=True)
    for node in NODES:
        cluster.exec(["bash", "-c", "rm -rf /tmp/dray-images-*"], user="root", node=node)


@pytest.fixture
def left(cluster) -> Callable[[str], str]:
    """What is in the folder for copies on a node."""
    return lambda node: cluster.exec(["bash", "-c", "ls -A /tmp/dray-images-* 2>/dev/null"], node=node).out


def seen(attempt: Path) -> list[tuple[str, list[str], list[str], list[str]]]:
    """By rank, one on each node."""
    return [json.loads((attempt / "logs" / f"rank-{rank}.log").read_text().splitlines()[-1]) for rank in (0, 1)]


@pytest.mark.parametrize(
    "by",
    [
        "auto",
        pytest.param("sbcast", marks=pytest.mark.slow),
        pytest.param("tree", marks=pytest.mark.slow),
        pytest.param("copy", marks=pytest.mark.slow),
    ],
)
def test_each_node_has_one_copy_which_goes_at_the_end(sbatch, root: Path, at, left, by: str) -> None:
    words = ("ranks_per_node=1", "preflight.when=never", "--", "python3", "-c", LOOK)
    ended = sbatch(at(by), f"{root}/slurm/multinode.sh", *words)
    assert ended.code == 0, ended.output
    wanted = json.loads((ended.attempt / "plan.json").read_text())["image_sha256"]
    assert len(wanted) == 64
    for starts, copies, digests, modes in seen(ended.attempt):
        assert copies == [starts]
        assert starts.endswith(f"/{wanted}.sif")
        assert (digests, set(modes) <= {"0o600", "0o644", "0o700"}) == ([wanted], True)
    assert [left(node) for node in NODES] == ["", ""]
    assert ("image: sbcast has copied it to 2 nodes in " in ended.output) == (by in ("auto", "sbcast"))
    assert (ended.attempt / "stage.json").exists() == (by == "tree")
    assert (ended.attempt / "stage.sh").exists() == (by in ("auto", "sbcast"))


@pytest.mark.slow
def test_a_recipe_trains_from_copies_that_nodes_handed_on(sbatch, at, left) -> None:
    ended = sbatch(at("tree"), "slurm/multinode.sh", "recipes/smoke-cpu.toml", *QUICK)
    assert ended.code == 0, ended.output
    assert len(ended.metrics("step")) == 4
    assert (ended.attempt / "stage.json").exists()
    assert [left(node) for node in NODES] == ["", ""]


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
def test_a_file_that_was_changed_on_its_way_is_no_copy(cluster, sbatch, root: Path, at, left) -> None:
    """Each node sees it, and gets the image in the next way."""
    tool = cluster.shared / "home" / "flips" / "sbcast"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(FLIPS)
    tool.chmod(0o755)
    tool.parent.chmod(0o755)
    path = "PATH=/shared/home/flips:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    words = ("ranks_per_node=1", "preflight.when=never", "--", "python3", "-c", LOOK)
    ended = sbatch(f"{at('auto')},{path}", f"{root}/slurm/multinode.sh", *words)
    assert ended.code == 0, ended.output
    assert "image: not copied by sbcast: after sbcast 2 of 2 nodes got another file; see logs/stage.log" in ended.output
    assert (ended.attempt / "logs/stage.log").read_text().count("dray: the copy of the image differs") == 2
    assert all(copies == [starts] and digests for starts, copies, digests, _ in seen(ended.attempt))
    assert (ended.attempt / "stage.json").exists()
    assert [left(node) for node in NODES] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["auto", "copy"])
def test_a_node_whose_folder_another_user_made_first(cluster, sbatch, root: Path, at, by: str) -> None:
    """It reads the shared file, and says so; the other node has its copy."""
    uid = cluster.exec(["id", "-u"], node="n2").out.strip()
    folder = f"/tmp/dray-images-{uid}"
    made = cluster.exec(["mkdir", "-m", "777", folder], user="nobody", node="n2", workdir="/tmp", env={"HOME": "/tmp"})
    assert made.code == 0, made.err
    words = ("ranks_per_node=1", "preflight.when=never", "--", "python3", "-c", LOOK)
    ended = sbatch(at(by), f"{root}/slurm/multinode.sh", *words)
    assert ended.code == 0, ended.output
    (first, copies, _, _), (second, others, _, _) = seen(ended.attempt)
    assert copies == [first]
    assert first.startswith("/tmp/dray-images-")
    assert (second.startswith("/tmp/"), others) == (False, [])
    log = (ended.attempt / "logs" / "node-1.log").read_text()
    assert f"dray: the image is not copied to this node, and is read from the shared file\n  where:  {folder}\n" in log
    assert ("1 of 2 nodes have no folder for it" in ended.output) == (by == "auto")
