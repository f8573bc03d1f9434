"""Check what a build of an image needs from this machine, before anything is fetched or written.

`python3 -m dray.fitness.build VARIANT` needs only Python's standard library: `make` runs it first.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dray.clients import apptainer, endpoint
from dray.config import checkout as checkouts
from dray.contract import exit_codes
from dray.contract.findings import DrayError, Finding, listed, nearest
from dray.fitness import namespaces, room
from dray.fitness.machine import Build, Machine
from dray.images.rootfs import squash

_BUILDER_MB = 400  # the builder's image with its own base
_PYTHON = (3, 11)
# What `make` prints even if nothing is wrong.
_SHOWN = ("image", "builder")


def check(build: Build, machine: Machine | None = None) -> list[Finding]:
    """All findings of this build; nothing is written."""
    machine = machine or Machine()
    first = [*_sudo(build, machine), *_variant(build)]
    if first:
        return first
    file = build.checkout / "containers" / build.variant / "image.toml"
    about = tomllib.loads(file.read_text(encoding="utf-8"))
    here = [*_processor(build, about, machine), *_python(build, machine)]
    return [
        *room.check(build, about.get("size"), machine),
        *here,
        *_builder(build, about.get("size") or {}, machine),
        *room.disk(build, machine),
    ]


def show(findings: Sequence[Finding], say: Callable[[str], None]) -> int:
    """Print what will be fetched, what is unwise and what is wrong. Returns the exit code."""
    for finding in findings:
        if finding.code:
            say(f"dray: {finding}")
        elif finding.kind == "note":
            say(f"dray: {finding._replace(problem=f'{finding.problem}: {finding.found}', found='')}")
        elif finding.problem.split()[0] in _SHOWN:
            say(f"dray: {finding.problem}: {finding.found}")
    codes = {finding.code for finding in findings} - {exit_codes.DONE}
    return max(codes, default=exit_codes.DONE)


def variants(checkout: Path) -> list[str]:
    """The variants that the checkout describes."""
    return sorted(path.parent.name for path in (checkout / "containers").glob("*/image.toml"))


def _unfit(problem: str, *, where: object = "", wanted: str, found: str = "", fix: str) -> Finding:
    return Finding(problem, str(where), wanted, found, fix, exit_codes.UNFIT)


def _sudo(build: Build, machine: Machine) -> Iterator[Finding]:
    """Refuse sudo in a user's checkout. Root may build in its own checkout, as in CI."""
    owner = build.checkout.stat().st_uid
    if machine.uid == 0 and machine.environment.get("SUDO_UID") and owner != 0:
        user = machine.environment.get("SUDO_USER", "$USER")
        yield Finding(
            "dray builds without root, and sudo would leave root's files in your checkout",
            where=str(build.checkout),
            wanted=f"the owner of the checkout, user id {owner}",
            found="sudo",
            fix=f"make image-{build.variant}\n"
            f"if Docker refuses you, first sudo usermod -aG docker {user}\n"
            "and log in again",
            code=exit_codes.CONFIG,
        )


def _variant(build: Build) -> Iterator[Finding]:
    known = variants(build.checkout)
    if build.variant not in known:
        near = nearest(build.variant, known) or "cpu"
        fix = f"make image-{near}; the images are {listed(known)}"
        yield Finding(f"there is no image {build.variant}", fix=fix, code=exit_codes.CONFIG)


def _processor(build: Build, about: Mapping[str, Any], machine: Machine) -> Iterator[Finding]:
    adopt = "use the site's own image: dray image adopt FILE"
    machines = about.get("machines", ["x86_64"])
    if machine.system != "Linux":
        yield _unfit(
            "dray builds images only on Linux",
            wanted=f"Linux on {' or '.join(machines)}",
            found=f"{machine.system} on {machine.processor}",
            fix=f"build on a Linux machine with the nodes' processor, such as a login node; or {adopt}",
        )
    elif machine.processor in machines:
        yield Finding("processor", found=machine.processor, kind="ok")
    else:
        folder = build.checkout / "containers"
        described = {
            name: tomllib.loads((folder / name / "image.toml").read_text()) for name in variants(build.checkout)
        }
        others = [name for name, one in described.items() if machine.processor in one.get("machines", ["x86_64"])]
        names = " or ".join(f"make image-{name}" for name in others)
        yield _unfit(
            f"torch has no wheels of {build.variant} for {machine.processor}",
            wanted=" or ".join(machines),
            found=machine.processor,
            fix=f"{names}, for {machine.processor}; or {adopt}"
            if others
            else f"build on a machine with {' or '.join(machines)}; or {adopt}",
        )


def _python(build: Build, machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    if machine.python < _PYTHON:
        yield _unfit(
            "this Python is too old for dray",
            where=sys.executable,
            wanted="Python 3.11 or newer",
            found=version,
            fix="make PYTHON=python3.11 ...; load a module of the site, or uv python install 3.11, to get it",
        )
    elif not (build.checkout / ".venv" / "host").exists() and not all(map(machine.has_module, ("venv", "ensurepip"))):
        yield _unfit(
            "this Python cannot make virtual environments",
            where=sys.executable,
            wanted="the modules venv and ensurepip",
            fix="sudo apt-get install python3-venv",
        )
    else:
        yield Finding("Python", found=f"{version} ({sys.executable})", kind="ok")


def _builder(build: Build, size: Mapping[str, Any], machine: Machine) -> Iterator[Finding]:
    """Apptainer on this machine, or Docker with Apptainer in a container."""
    tool = apptainer.program()
    own = tool is not None and machine.uid != 0
    if "podman" in build.formats and not shutil.which("podman"):
        yield _unfit("podman is not on this machine", wanted="podman, for --format podman", fix="install it")
    if tool and own:
        yield Finding("builder", found=f"{tool} on this machine", kind="ok")
        if " " in f"{build.checkout}{build.sif}":
            yield Finding(
                f"{tool} cannot use a folder whose path has a space",
                where=str(build.checkout),
                fix="move the checkout to a path without a space, or build with Docker",
                code=exit_codes.CONFIG,
            )
        if "sif" in build.formats:
            yield from _squash()
        if namespaces.setuid(tool):
            yield Finding("user namespaces", found=f"{tool} is installed with setuid, and needs none", kind="ok")
        else:
            yield namespaces.check(machine.root, trial=machine.namespaces(), container=False)
    if not own or "docker" in build.formats:
        loaded = size.get("unpacked_mb", 0) if "docker" in build.formats else 0
        yield from _docker(machine, alone=not own and "docker" not in build.formats, tool=tool, mb=loaded)


def _squash() -> Iterator[Finding]:
    try:
        squash.require()
    except DrayError as error:
        fix = error.finding.fix or "install squashfs-tools 4.4 or newer"
        yield error.finding._replace(where=error.finding.where[:200], fix=fix)
    else:
        yield Finding("mksquashfs", found="writes the same bytes every time", kind="ok")


def _docker(machine: Machine, *, alone: bool, tool: str | None, mb: int) -> Iterator[Finding]:
    """`alone`: Docker only builds the SIF. Else it also loads an image of so many `mb`."""
    try:
        found = endpoint.find(machine.environment, machine.home)
        try:
            endpoint.knock(found)
        except OSError as error:
            raise endpoint.unreachable(found, error, machine.environment) from error
    except DrayError as error:
        other = (
            f"run the command as an ordinary user, with this machine's {tool}"
            if tool
            else "load or install Apptainer (module load apptainer), which builds without Docker"
        )
        yield error.finding._replace(fix=f"{other}\nor {error.finding.fix}" if alone else error.finding.fix)
        return
    about = endpoint.info(found)
    yield Finding("builder" if not tool or machine.uid == 0 else "Docker", found=f"Docker at {found}", kind="ok")
    rootless = any("rootless" in option for option in about.get("SecurityOptions") or [])
    own_kernel = about.get("OSType", "linux") == "linux" and about.get("KernelVersion") == platform.release()
    lends = not tool or machine.uid == 0
    if lends and own_kernel and not rootless:
        yield namespaces.check(machine.root, trial=machine.namespaces(), container=True)
    folder = Path(about.get("DockerRootDir", "/nonexistent"))
    needed = _BUILDER_MB * lends + mb
    if own_kernel and folder.is_dir() and machine.free(folder) < needed * 1e6:
        yield _unfit(
            "Docker's disk has no room for the images",
            where=folder,
            wanted=f"{needed / 1000:.1f} GB",
            found=f"{machine.free(folder) / 1e9:.1f} GB free",
            fix="docker system df shows what uses the space; docker system prune removes what is not in use",
        )


def main() -> int:
    """Print what `make` shows before it installs anything. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="dray.fitness.build")
    parser.add_argument("variant")
    parser.add_argument("--format", action="append", choices=("sif", "docker", "podman"))
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--bundle", action="store_true")
    asked = parser.parse_args()
    if asked.wheels and not asked.wheels.is_dir():
        print(f"dray: the folder of wheels does not exist\n  where:  {asked.wheels}", file=sys.stderr)
        return exit_codes.CONFIG
    build = Build(
        checkout=checkouts.root(build=True),
        variant=asked.variant,
        formats=asked.format or ("sif",),
        wheels=asked.wheels,
        bundled=asked.bundle,
    )
    return show(check(build), lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DrayError as error:
        print(f"dray: {error}", file=sys.stderr)
        sys.exit(error.finding.code)
