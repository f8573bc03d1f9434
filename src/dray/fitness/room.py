"""The free space on the disks that an image build writes, and the kind of disk. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dray.contract import exit_codes
from dray.contract.findings import Finding
from dray.fitness.machine import Build, Machine

# The base and Debian's packages, which all variants share.
_DEBIAN_MB = 115
_SMALL_MB = 50
# What the tree holds until 70-prune.sh removes it: measured for cpu and cuda.
_PRUNED_MB = 1000
_NETWORK = {
    "lustre", "nfs", "nfs4", "gpfs", "beegfs", "beegfs_nodev", "ceph", "fuse.ceph", "wekafs", "panfs", "afs", "cifs",
    "smb3", "pvfs2", "glusterfs", "fuse.glusterfs", "fuse.sshfs",
}  # fmt: skip


def check(build: Build, size: Mapping[str, Any] | None, machine: Machine) -> Iterator[Finding]:
    """Check the disk of build/, and the disk of the SIF if it is another one."""
    subject = f"image {build.variant}"
    if size is None:
        fix = "add it after the first build; docs/extending.md has an example"
        yield Finding(
            subject, found="its image.toml has no [size], so dray cannot check the free space", fix=fix, kind="note"
        )
        return
    fetch = 0 if build.bundled else max(0, size["wheels_mb"] + _DEBIAN_MB - _present_mb(build))
    # The unpacked files before they are pruned, or with the packed image beside them; wheels are linked, not copied.
    packed = 2 * size["sif_mb"] if "sif" in build.formats else 0
    engines = {"docker", "podman"} & {*build.formats}
    packed += size["unpacked_mb"] if engines else 0
    work = size["unpacked_mb"] + max(_PRUNED_MB, packed)
    ours, theirs = _that_is(build.checkout / "build"), _that_is(build.sif.parent)
    needs = {ours: fetch, theirs: work}
    if ours.stat().st_dev == theirs.stat().st_dev:
        needs = {ours: fetch + work}
    needed = []
    for folder, mb in needs.items():
        free = machine.free(folder)
        named = "build/" if folder == ours else folder
        needed.append(f"needs {mb / 1000:.1f} GB in {named} ({free / 1e9:.0f} GB free)")
        if free < mb * 1e6:
            yield Finding(
                f"there is not enough disk space to build the image {build.variant}",
                where=str(folder),
                wanted=f"{mb / 1000:.1f} GB: {fetch / 1000:.1f} to fetch, {work / 1000:.1f} for its files",
                found=f"{free / 1e9:.1f} GB free",
                fix="make room"
                if engines
                else f"make room; or build on another disk, after make install:\n"
                f".venv/bin/dray image build {build.variant} --out FOLDER/{build.sif.name}",
                # An image that exists from the same inputs is not built again.
                code=exit_codes.DONE if build.sif.exists() and fetch < _SMALL_MB and not engines else exit_codes.UNFIT,
                kind="note",
            )
    fetched = f"fetch {fetch / 1000:.1f} GB" if fetch >= _SMALL_MB else "almost nothing to fetch"
    yield Finding(subject, found=f"{fetched}, {', '.join(needed)}", kind="ok")


def _present_mb(build: Build) -> int:
    """The MB of it that were fetched before."""
    pins = re.findall(r"^([\w.-]+)==([\w.!]+)", "\n".join(file.read_text() for file in build.locks), re.MULTILINE)
    locked = {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in pins}
    fetched, base, debs = (build.checkout / "build" / name for name in ("wheels", "base", "debs"))
    files = [path for folder in filter(None, (build.wheels, fetched)) for path in folder.glob("*-*") if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in files if _pin(path.name) in locked}
    has_debian = any(debs.glob("*/*.deb")) and any(base.glob("*"))
    return round(sum(sizes.values()) / 1e6) + _DEBIAN_MB * has_debian


def _pin(file: str) -> tuple[str, str]:
    """The package and the version, without a vendor's ending, of a wheel's or an archive's name."""
    name, _, rest = file.partition("-")
    version = rest.partition("-")[0].removesuffix(".tar.gz")
    return re.sub(r"[-_.]+", "-", name).lower(), version.partition("+")[0]


def disk(build: Build, machine: Machine) -> Iterator[Finding]:
    """Note a network disk: a build writes tens of thousands of small files beside the SIF."""
    folder = _that_is(build.sif.parent)
    kind = _filesystem(folder, machine.root)
    if kind in _NETWORK:
        yield Finding(
            "scratch",
            where=str(folder),
            found=f"a network disk ({kind}), on which a build takes many times as long",
            fix=f".venv/bin/dray image build {build.variant} --out /tmp/{build.sif.name}\n"
            "then move it and its .json here; or clone dray to a local disk of this machine",
            kind="note",
        )


def _filesystem(folder: Path, root: Path) -> str:
    try:
        lines = (root / "proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    fields = [line.split() for line in lines]
    mounts = {point.replace("\\040", " "): kind for _, point, kind, *_ in fields}
    path = str(folder.resolve())
    above = [point for point in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return mounts[max(above, key=len)] if above else ""


def _that_is(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.is_dir())
