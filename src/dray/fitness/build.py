"""Check what a build of an image needs from this machine, before anything is fetched."""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dray import process
from dray.clients import builder, docker
from dray.config.image_definition import Image
from dray.contract import exit_codes
from dray.contract.findings import ConfigError, DrayError, Finding, UnfitError, listed, nearest
from dray.images import inputs
from dray.images.rootfs import squashfs

_PROC, _APPARMOR = Path("/proc/sys"), Path("/etc/apparmor.d")
_DEBIAN_MB = 115  # the base and Debian's packages, which all variants share
_PRUNED_MB = 1000  # what the tree holds until 70-prune.sh removes it: measured for cpu and cuda
# As stat names them. A build writes tens of thousands of small files.
_NETWORK_DISKS = ("lustre", "nfs", "gpfs", "ceph", "panfs", "afs", "cifs", "smb2")
# The kernel's switches that forbid user namespaces, by a value, and the command that allows them.
_SWITCHES = (
    ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "install Apptainer 1.3.4 or newer from its project's .deb, which brings a profile of AppArmor\n"
        "or sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Build:
    """The build that is checked."""

    checkout: Path
    variant: str
    formats: Sequence[str] = ("sif",)
    out: Path | None = None
    bundled: bool = False

    @property
    def sif(self) -> Path:
        """The image's file, beside which the build has its scratch folder."""
        return (self.out or self.checkout / "build" / f"dray-{self.variant}.sif").absolute()


def variants(checkout: Path) -> list[str]:
    """The variants that the checkout describes."""
    return sorted(path.parent.name for path in (checkout / "containers").glob("*/image.toml"))


def check(build: Build) -> list[Finding]:
    """All findings of this build; nothing is written."""
    known = variants(build.checkout)
    if build.variant not in known:
        near = nearest(build.variant, known) or "cpu"
        raise ConfigError(
            f"there is no image {build.variant}", fix=f"make image-{near}; the images are {listed(known)}"
        )
    image = inputs.image(build.checkout, build.variant)
    findings = [_processor(image), *_room(build, image)]
    try:
        findings += _builder(build)
    except DrayError as error:
        findings.append(error.finding)
    return findings


def _processor(image: Image) -> Finding:
    here = f"{platform.system()} on {platform.machine()}"
    if here in [f"Linux on {machine}" for machine in image.machines]:
        return Finding("processor", found=here, kind="ok")
    return Finding(
        f"the image {image.variant} cannot be built on this machine: torch has no wheels of it",
        wanted=f"Linux on {' or '.join(image.machines)}",
        found=here,
        fix="build on a machine with the nodes' processor, such as a login node\n"
        "or use the site's own image: dray image adopt FILE",
        code=exit_codes.UNFIT,
    )


def _room(build: Build, image: Image) -> Iterator[Finding]:
    """The free space on the disks of what is fetched and of the SIF, and whether the latter is a network disk."""
    fetched = next(path for path in (build.checkout / "build", build.checkout) if path.is_dir())
    folder = next(path for path in build.sif.parents if path.is_dir())
    if image.size:
        fetch = 0 if build.bundled else image.size.wheels_mb + _DEBIAN_MB
        # The files before they are pruned, or with the packed image beside them; wheels are linked, not copied.
        packed = 2 * image.size.sif_mb if "sif" in build.formats else 0
        if list(build.formats) != ["sif"]:
            packed += image.size.unpacked_mb
        work = image.size.unpacked_mb + max(_PRUNED_MB, packed)
        if fetched.stat().st_dev == folder.stat().st_dev:
            needs = {folder: fetch + work}
        else:
            needs = {fetched: fetch, folder: work}
        has_wheels = (fetched / "wheels").is_dir()
        for disk, needed in needs.items():
            # An earlier build may have left most of it, and its space is taken already.
            is_partly_there = has_wheels and disk.stat().st_dev == fetched.stat().st_dev
            code = exit_codes.DONE if is_partly_there else exit_codes.UNFIT
            free = shutil.disk_usage(disk).free / 1e6
            found = f"a build needs {needed / 1000:.1f} GB of disk in {disk}, which has {free / 1000:.1f} GB free"
            room = Finding(f"image {build.variant}", found=found, kind="ok")
            if free < needed:
                fix = "make room"
                if disk == folder:
                    fix += f"; or dray image build {build.variant} --out FOLDER/{build.sif.name}, on another disk"
                room = room._replace(fix=fix, code=code, kind="note")
            yield room
    kind = process.run(["stat", "--file-system", "--format=%T", folder], check=False).out.strip()
    if kind in _NETWORK_DISKS:
        fix = f"dray image build {build.variant} --out /tmp/{build.sif.name}, then move it and its .json here"
        found = f"{folder} is on a network disk ({kind}), on which a build takes many times as long"
        yield Finding("scratch", found=found, fix=fix, kind="note")


def _builder(build: Build) -> Iterator[Finding]:
    """Apptainer on this machine, or Docker with Apptainer in a container. The first thing that is missing is raised."""
    for name in ("docker", "podman"):
        if name in build.formats and not process.which(name):
            raise UnfitError(f"{name} is not on this machine", wanted=f"{name}, for --format {name}", fix="install it")
    if "docker" in build.formats:
        docker.client().close()
    with builder.engine() as client:
        if client:
            yield Finding("builder", found=f"Docker at {docker.endpoint()}", kind="ok")
            if client.info().get("KernelVersion") == platform.release():  # Docker Desktop has a kernel of its own
                yield _namespaces(container=True)
            return
    program = process.apptainer() or ""
    yield Finding("builder", found=f"{program} on this machine", kind="ok")
    if re.search("[ ,:]", f"{build.checkout}{build.sif}"):
        raise ConfigError(
            f"{program} cannot use a folder whose path has a space, a comma or a colon",
            where=build.checkout,
            fix="move the checkout to another path, or build with Docker",
        )
    if "sif" in build.formats:
        squashfs.require()
    if not _has_setuid(program):
        yield _namespaces(container=False)


def _has_setuid(program: str) -> bool:
    """Whether this Apptainer is installed with setuid, and so needs no user namespace."""
    folder = re.search(r"^LIBEXECDIR=(.+)$", process.run([program, "buildcfg"], check=False).out, re.MULTILINE)
    starters = Path(folder[1]).glob("*/bin/starter-suid") if folder else ()
    return any(path.stat().st_mode & stat.S_ISUID for path in starters)


def _namespaces(*, container: bool) -> Finding:
    """Enter a user namespace and mount in it, as Apptainer does. The builder's container gets its own from Docker:
    there only a switch of the kernel, which it shares, is a reason.
    """
    ordinary = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"] if os.geteuid() == 0 else []
    # What mounts is a child of unshare's: AppArmor may allow unshare itself more.
    trial = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]  # noqa: S108
    done = process.run([*ordinary, *trial], check=False)
    allowed = Finding("user namespaces", found="ordinary users may make them", kind="ok")
    if not done.code:
        return allowed
    problem = "ordinary users cannot make user namespaces, and Apptainer builds in one"
    profile = next(_APPARMOR.glob("*apptainer*"), None)
    for name, forbids, fix in _SWITCHES:
        switch = _PROC / name
        if not switch.exists() or switch.read_text().strip() != forbids:
            continue
        if "apparmor" in name and profile:
            return allowed._replace(found=f"AppArmor allows them: {profile}")
        kept = "and the same setting in a file of /etc/sysctl.d, to keep it after a reboot"
        raise UnfitError(problem, found=f"{name.replace('/', '.')} is {forbids}", fix=f"{fix}\n{kept}")
    if container:
        return allowed._replace(found="the builder's container makes its own")
    fix = "ask the administrators for user namespaces, or for Apptainer with setuid; or use Docker"
    raise UnfitError(problem, found=done.err.strip(), fix=fix)
