"""An image with torch and transformers and without dray, made here, trains on the cluster by plain sbatch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dray.containers import builder
from dray.images import adopt, store
from dray.images.sif import format as sif_format

pytestmark = [pytest.mark.cluster, pytest.mark.sif]

NAME = "adopted-by-a-test"
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
def adopted(root: Path, tmp_path_factory):
    """As the user has it from somebody: a SIF of another name, elsewhere."""
    folder = tmp_path_factory.mktemp("theirs")
    ours = sif_format.read(root / "build" / "dray-cpu.sif")
    argv = ["sh", "-c", TAKE_OUT, "sh", str(ours.path), str(folder), str(ours.system.offset)]
    done = builder.tool(argv, binds={ours.path: False, folder: True})
    assert done.code == 0, done.err
    theirs = folder / "Their Image.sif"
    sif_format.write(folder / "squashfs", theirs, epoch=1_700_000_000, definition=b"Bootstrap: docker\nFrom: theirs\n")
    file = store.adopted(root, NAME)
    try:
        yield adopt.adopt(root, str(theirs), name=NAME, force=True)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(file.parent, ignore_errors=True)


def test_it_trains_and_runs_commands(adopted, sbatch, short, plain, losses_of) -> None:
    """Planned in dray's own image first, which asks the batch script for the adopted one; the same losses."""
    assert (adopted.variant, adopted.lacks) == ("cpu", ())
    assert {"python", "libc", "torch", "transformers"} <= adopted.versions.keys()
    assert "pydantic" in {name.split()[0] for name in adopted.brought}
    ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", f"adopted={NAME}", *short)
    assert losses_of(ended) == plain
    written = json.loads((ended.attempt / "plan.json").read_text())
    assert written["image"] == str(adopted.file)
    assert written["image_sha256"] == adopted.digest.removeprefix("sha256:")
    looks = "import os, dray, sys; print(dray.__file__, sys.prefix)"
    ended = sbatch("slurm/multinode.sh", f"adopted={NAME}", "preflight.when=always", "--", "python3", "-c", looks)
    assert ended.code == 0, ended.output
    assert f"{adopted.file.with_suffix('')}/dray/__init__.py /usr" in ended.output
    assert "preflight: gloo over TCP" in ended.output
