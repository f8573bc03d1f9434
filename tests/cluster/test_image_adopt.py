"""An image without dray, made here, runs on the cluster: adopted before, by the job, or without any Python."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from dray.clients import builder
from dray.images import adopt, store
from dray.images.sif import format as sif_format

pytestmark = [pytest.mark.cluster, pytest.mark.sif]

NAME = "adopted-by-a-test"
SHARED = "/shared/theirs/Their Image.sif"
# The CPU image's packages as Debian's own Python finds them; dray, and what dray alone needs, are gone.
TAKE_OUT = """
set -e
cd "$2"
unsquashfs -no-progress -no-xattrs -quiet -dest root -offset "$3" "$1" >/dev/null
to=root/usr/local/lib/python3.11/dist-packages
mkdir -p $to
mv root/opt/dray/lib/python3.11/site-packages/* $to/
for name in dray pydantic typer rich yaml _yaml [Pp]y[Yy]aml deepspeed aihwkit; do rm -rf $to/$name*; done
rm -rf root/opt/dray root/.singularity.d
mksquashfs root squashfs -comp zstd -Xcompression-level 1 -no-progress -noappend -quiet -all-root
"""


@pytest.fixture(scope="module")
def theirs(root: Path, cluster, tmp_path_factory) -> Path:
    """As the user has it from somebody: a SIF of another name, elsewhere, which the cluster's user may read."""
    folder = tmp_path_factory.mktemp("theirs")
    ours = sif_format.read(root / "build" / "dray-cpu.sif")
    argv = ["sh", "-c", TAKE_OUT, "sh", str(ours.path), str(folder), str(ours.system.offset)]
    done = builder.tool(argv, binds={ours.path: False, folder: True})
    assert done.code == 0, done.err
    place = cluster.shared / "theirs"
    place.mkdir(exist_ok=True)
    file = place / "Their Image.sif"
    sif_format.write(folder / "squashfs", file, epoch=1_700_000_000, definition=b"Bootstrap: docker\nFrom: theirs\n")
    file.chmod(0o644)
    shutil.rmtree(folder)
    try:
        yield file
    finally:
        shutil.rmtree(place)
        # Where the cluster's user may not write the checkout.
        shutil.rmtree(cluster.shared / "runs" / ".adopted", ignore_errors=True)


@pytest.fixture(scope="module")
def adopted(root: Path, theirs: Path):
    """By the dray command; what the image lacks is fetched by this machine's pip."""
    try:
        yield adopt.adopt(root, str(theirs), name=NAME, force=True)
    finally:
        shutil.rmtree(store.adopted(root, NAME).parent, ignore_errors=True)


@pytest.mark.slow
def test_it_trains_and_runs_commands(adopted, sbatch, short, plain, losses_of) -> None:
    """Planned in the image itself; the same losses."""
    assert (adopted.variant, adopted.lacks) == ("cpu", ())
    assert {"python", "libc", "torch", "transformers"} <= adopted.versions.keys()
    assert "pydantic" in {name.split()[0] for name in adopted.brought}
    shared = adopted.file.with_name("source")
    # The cluster sees the file by another path than this machine.
    shared.unlink()
    shared.symlink_to(SHARED)
    ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", f"adopted={NAME}", *short)
    assert losses_of(ended) == plain
    written = json.loads((ended.attempt / "plan.json").read_text())
    assert written["image"] == str(adopted.file)
    assert written["image_sha256"] == adopted.digest.removeprefix("sha256:")
    looks = "import os, dray, sys; print(dray.__file__, sys.prefix)"
    ended = sbatch("slurm/multinode.sh", f"adopted={NAME}", "preflight.when=always", "--", "python3", "-c", looks)
    assert ended.code == 0, ended.output
    assert "/src/dray/__init__.py /usr" in ended.output
    assert "preflight: gloo over TCP" in ended.output


def test_a_job_adopts_it_on_the_way_and_a_changed_file_stops_the_next(theirs, adopted, sbatch, cluster) -> None:
    """Its packages are in build/wheels since this machine adopted it; a compute node has no network."""
    shutil.rmtree(adopted.file.parent)
    looks = (
        "launcher=python",
        "--",
        "python3",
        "-c",
        "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])",
    )
    ended = sbatch("slurm/multinode.sh", f"adopted={SHARED}", *looks)
    assert ended.code == 0, ended.output
    assert "dray: adopted in " in ended.output
    assert "rank 0 of 2" in ended.output
    ended = sbatch("slurm/multinode.sh", f"adopted={SHARED}", *looks)
    assert ended.code == 0, ended.output
    assert "dray: adopt" not in ended.output
    with theirs.open("ab") as file:
        file.write(b"changed")
    ended = sbatch("slurm/multinode.sh", f"adopted={SHARED}", *looks)
    assert ended.code == 78
    assert ended.output.startswith(f"dray: the image was changed since it was adopted\n  where:  {SHARED} on node n1\n")


@pytest.mark.slow
def test_a_login_node_without_python(adopted, cluster, root: Path) -> None:
    """README's lines of slurm/dray: bash, Slurm and Apptainer alone; `adopted` has left the wheels."""
    assert cluster.exec(["bash", "-c", "command -v python3"])[0] != 0
    script = f"""
        set -e
        export DRAY_RUNS=/shared/home/their-runs
        dray={root}/slurm/dray
        $dray image adopt {shlex.quote(SHARED)} --name {NAME}-login --force
        $dray submit --nodes 2 adopted={NAME}-login -- python3 -c 'print(6 * 7)'
        until [[ "$($dray status)" == *": done ("* ]]; do
          ((SECONDS < 200)) || exit 124
          sleep 1
        done
        $dray runs
        $dray logs
        $dray why
    """
    code, out, err = cluster.exec(["bash", "-c", script])
    try:
        assert code == 0, out + err
        assert "rank 0 | 42" in out
        assert "attempt 1: done, nothing failed" in out
    finally:
        shutil.rmtree(root / "build" / f"dray-{NAME}-login", ignore_errors=True)
        shutil.rmtree(cluster.shared / "home" / "their-runs", ignore_errors=True)
