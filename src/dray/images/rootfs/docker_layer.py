"""A root filesystem as a Docker image of one layer: the SIF's files, and the same bytes every time."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shlex
import tarfile
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO

from dray.images.sif.format import MACHINES

# What Apptainer adds to a root filesystem for itself.
_APPTAINERS = {".singularity.d", ".exec", ".run", ".shell", ".test", "environment", "singularity"}
_LAYER = "layer.tar"


def pack(rootfs: Path, out: Path, *, epoch: int, inputs: Path, tag: str, labels: Mapping[str, str]) -> None:
    """Write `out`, an archive for `docker load` and `podman load`."""
    print("dray: pack the Docker image", flush=True)
    with out.open("w+b") as file:
        # The layer's size, and with it its header, is known only when all of it is written.
        file.seek(tarfile.BLOCKSIZE)
        _write(rootfs, file, epoch=epoch)
        end = file.tell()
        file.seek(0)
        file.write(_entry(_LAYER, end - tarfile.BLOCKSIZE, epoch).tobuf(tarfile.GNU_FORMAT))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        config = _config(inputs, layer=digest, epoch=epoch, labels=labels)
        name = f"{hashlib.sha256(config).hexdigest()}.json"
        manifest = json.dumps([{"Config": name, "RepoTags": [tag], "Layers": [_LAYER]}]).encode()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path, content in ((name, config), ("manifest.json", manifest)):
                archive.addfile(_entry(path, len(content), epoch), io.BytesIO(content))


def _write(rootfs: Path, out: BinaryIO, *, epoch: int) -> None:
    """Write the layer's tar: the files are sorted, belong to root, and have one time."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(rootfs.iterdir()):
            if path.name not in _APPTAINERS:
                tar.add(path, path.name, filter=partial(_sealed, epoch=epoch))


def _sealed(entry: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = epoch
    return entry


def _entry(name: str, size: int, epoch: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return _sealed(entry, epoch)


def _config(inputs: Path, *, layer: str, epoch: int, labels: Mapping[str, str]) -> bytes:
    made = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return json.dumps(
        {
            "architecture": MACHINES[platform.machine()],
            "os": "linux",
            "created": made,
            "config": {
                "Env": [shlex.split(line)[0] for line in (inputs / "environment").read_text().splitlines()],
                "Cmd": ["dray", "--help"],
                "Labels": dict(labels),
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer}"]},
            "history": [{"created": made, "created_by": "dray image build"}],
        },
        sort_keys=True,
    ).encode()
