"""Size and start of an image against the plain way: `pip install` of the same packages on the same base, gzip squashfs.

It wants `make image-cpu`, a cluster that is up (`make cluster`), strace, and root, who alone empties the page cache:

    .venv/bin/python benchmarks/images.py [VARIANT]
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import process
from dray.clients import builder, docker
from dray.cluster.local import LocalCluster
from dray.config import dray_home
from dray.images import inputs, store
from dray.images.inputs import BuildContext
from dray.images.rootfs import PROGRAM, ROOTFS, squashfs
from dray.images.sif import format as sif_format

EPOCH = 0
ROUNDS = 3
STARTS = ("import torch", "import torch, transformers, deepspeed")
# One change each against the packing that dray uses.
PACKINGS = {
    "gzip, 128 K": ("-comp", "gzip"),
    "zstd 15, 1 M": ("-comp", "zstd", "-Xcompression-level", "15", "-b", "1M"),
    "zstd 3, 256 K": ("-comp", "zstd", "-Xcompression-level", "3", "-b", "256K"),
}
PLAIN = """Bootstrap: localimage
From: {{ BASE }}

%post
    set -e
    apt-get -qq -o APT::Sandbox::User=root install --yes --no-install-recommends /mnt/debs/*.deb
    python3.11 -m venv /opt/dray
    PIP="/opt/dray/bin/pip install -q --no-cache-dir --no-index --no-deps"
    $PIP /mnt/wheels/*.whl /mnt/dray/*.whl
    $PIP --no-build-isolation /mnt/wheels/deepspeed-*.tar.gz
    rm -rf /var/lib/apt/lists /var/cache/apt

%environment
    export PATH=/opt/dray/bin:$PATH
"""


def main() -> None:
    """Make the plain image and the other packings, and start them all in turn."""
    variant = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    root = dray_home.root()
    sif = store.sif(root, variant)
    source = inputs.gather(root, variant, base=os.environ.get("DRAY_IMAGE_BASE"), say=_quiet)
    with TemporaryDirectory(dir=root / "build", prefix=".bench-") as made, closing(docker.client()) as client:
        scratch = Path(made)
        scratch.chmod(0o755)
        images = {"dray": sif, "plain": _plain(root, source, scratch / "plain")}
        print(f"plain, gzip 128 K: {_megabytes(images['plain'])}; dray: {_megabytes(sif)}", flush=True)
        images["folder"] = scratch / "plain" / ROOTFS
        for name, words in PACKINGS.items():
            images[name] = _repacked(sif, scratch, name, words)
        for code in STARTS:
            _start(LocalCluster(client), images, code)
        _opened(images["folder"])


def _plain(root: Path, source: BuildContext, scratch: Path) -> Path:
    """The same packages as most people install them, and Apptainer's own packing."""
    scratch.mkdir()
    definition = scratch / "plain.def"
    definition.write_text(PLAIN)
    argv: list[str | Path] = [*PROGRAM, definition, source.base, scratch, "--bind", source.inputs, "/mnt"]
    started = time.monotonic()
    builder.run(root, argv, binds={scratch: True, source.inputs: False, source.base: False}, on_line=_quiet)
    out = _packed(scratch / ROOTFS, scratch / "plain.squashfs", ("-comp", "gzip"))
    print(f"plain: built in {time.monotonic() - started:.0f} s")
    return out


def _repacked(sif: Path, scratch: Path, name: str, words: Iterable[str]) -> Path:
    """The files of dray's image, packed otherwise."""
    rootfs = scratch / "rootfs"
    if not rootfs.exists():
        offset = str(sif_format.read(sif).system.offset)
        builder.tool(["unsquashfs", "-offset", offset, "-d", str(rootfs), str(sif)], binds={sif: False, scratch: True})
    started = time.monotonic()
    out = _packed(rootfs, scratch / f"{re.sub('[^a-z0-9]+', '-', name)}.squashfs", words)
    print(f"{name}: {_megabytes(out)}, packed in {time.monotonic() - started:.0f} s", flush=True)
    return out


def _packed(rootfs: Path, out: Path, words: Iterable[str]) -> Path:
    argv = [word for word in squashfs.argv(rootfs, out, epoch=EPOCH) if word not in squashfs.COMPRESSION]
    done = builder.tool([*argv, *words], binds={out.parent: True})
    if done.code != 0:
        sys.exit(done.err)
    return out


def _start(cluster: LocalCluster, images: dict[str, Path], code: str) -> None:
    """Each in turn, round after round, so that a machine that slows down slows all of them."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for name, image in images.items():
            for state in ("cold", "warm"):
                if state == "cold":
                    Path("/proc/sys/vm/drop_caches").write_text("3")
                run = f"TIMEFORMAT=%R; time apptainer --quiet exec '{image}' /opt/dray/bin/python3 -c '{code}'"
                ended = cluster.exec(["bash", "-c", run], node="n1")
                if ended.code != 0:
                    sys.exit(ended.err)
                seconds.setdefault((name, state), []).append(float(ended.err.split()[-1]))
    print(f"\n{code}: median of {ROUNDS}, seconds (ratio to the folder)")
    for state in ("cold", "warm"):
        folder = statistics.median(seconds["folder", state])
        for name in images:
            median = statistics.median(seconds[name, state])
            print(f"  {state} {name:<16} {median:6.2f}  {median / folder:5.2f}")


def _opened(folder: Path) -> None:
    """Files that a start opens on the disk that holds the folder. Of an image it is one, the image."""
    code = STARTS[1]
    process.run(["cp", "--archive", "/dev/urandom", "/dev/null", folder / "dev"])  # torch reads the first
    argv = ["strace", "-f", "-qq", "-e", "trace=openat", "-e", "status=successful", "chroot", str(folder)]
    done = process.run([*argv, "/opt/dray/bin/python3", "-c", code])
    paths = re.findall(r'openat\([^"]*"([^"]+)"', done.err)
    print(f"\n{code}: {len(paths)} opens, {len(set(paths))} files in a folder; one in an image")


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.0f} MB"


def _quiet(_line: str) -> None:
    """The build's lines are in its own log."""


if __name__ == "__main__":
    main()
