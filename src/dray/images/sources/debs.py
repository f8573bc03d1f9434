"""Debian's packages, which apt fetches inside the base that they are for; the build itself needs no network."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote

from dray.clients import builder, builder_container, docker, progress
from dray.config import mirrors
from dray.contract.findings import ConfigError
from dray.images.rootfs import PROGRAM

INSTALLED = "installed"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# The last word of a lock's line, for packages of the slim image: another base may lack them or have other versions.
_OF_BASE = "base"


def lock_file(checkout: Path, architecture: str = "") -> Path:
    """The lock for an architecture, by Debian's name for it (amd64, arm64); else for this machine's."""
    machine = platform.machine()
    return checkout / "containers" / f"debian-{architecture or _ARCHITECTURES.get(machine, machine)}.lock"


def fetch(
    checkout: Path, *, base: Path, identity: str, as_locked: bool = True, say: Callable[[str], None] = print
) -> Path:
    """The folder with the packages for this base, fetched if it is missing. Refuses packages that are not as locked."""
    containers = checkout / "containers"
    path = lock_file(checkout)
    locked = path.read_text() if path.exists() else ""
    read = [(containers / name).read_text() for name in ("debian.in", "debs.sh", "debian.sh")]
    asked = [identity, locked, *read, mirrors.sed(), "" if as_locked else "current"]
    folder = checkout / "build" / "debs" / hashlib.sha256("\n".join(asked).encode()).hexdigest()[:16]
    if not folder.exists():
        _download(checkout, folder, base=base, locked=locked, current=not as_locked, say=say)
    moved = differences(folder, path)
    if moved and as_locked:
        raise ConfigError(
            "Debian's packages are not as locked",
            where=path,
            found="\n".join(moved),
            fix="--debian current (make: DEBIAN=current) takes today's packages\n"
            "or make another base: containers/base/make-base.sh bookworm build/base/bookworm.tar\n"
            "or lock again: dray image lock debian",
        )
    for difference in moved:
        say(f"dray: not as locked: {difference}")
    return folder


def lock(checkout: Path, *, base: Path, say: Callable[[str], None], check: bool = False) -> list[str]:
    """Compare today's packages with each architecture's lock; returns the changes. Writes the locks, unless `check`."""
    changed = []
    now = datetime.now(UTC)
    for architecture in _ARCHITECTURES.values():
        path = lock_file(checkout, architecture)
        with TemporaryDirectory(dir=_build(checkout), prefix=".debs-") as scratch:
            folder = Path(scratch) / "debs"
            _download(checkout, folder, base=base, locked="", say=say, architecture=architecture)
            before, found = _locked(path), _found(folder)
            names = _installed(folder)
            for name in found.keys() & names.keys():
                found[name] += f" {_OF_BASE}"
            changed += [
                f"{architecture}: {name} {_version(before.get(name))} -> {_version(found.get(name))}"
                for name in sorted(before.keys() | found.keys())
                if before.get(name) != found.get(name)
            ]
            if not check:
                lines = "".join(f"{line}\n" for _, line in sorted(found.items()))
                path.write_text(f"# archive {now:%Y%m%dT%H%M%SZ}\n{lines}")
    return changed


def differences(folder: Path, lock: Path) -> list[str]:
    """The packages that an image would have in another version than the lock's, or with other bytes.

    Packages that belong to the base may be newer there.
    """
    locked, found, installed = _locked(lock), _found(folder), _installed(folder)
    other = []
    for name in sorted(locked.keys() | found.keys()):
        wanted, own = locked.get(name, ""), installed.get(name, "")
        of_base = wanted.endswith(f" {_OF_BASE}")
        line = wanted.removesuffix(f" {_OF_BASE}")
        if name in found:
            if found[name] != line:
                other.append(f"{name} {_version(line)} -> {_version(found[name])}")
        elif of_base:
            continue
        elif not own:
            other.append(f"{name} {_version(line)} -> none")
        elif own != _version(line):
            other.append(f"{name} {_version(line)} -> {own}, in the base")
    return other


def _version(line: str | None) -> str:
    return line.split()[1] if line else "none"


def _locked(lock: Path) -> dict[str, str]:
    """The lines of a lock by their packages; the first one has the date of Debian's archive."""
    lines = lock.read_text().splitlines() if lock.exists() else []
    return {line.split()[0]: line for line in lines if line and not line.startswith("#")}


def _found(folder: Path) -> dict[str, str]:
    """NAME VERSION ARCHITECTURE SHA256 of each package that was fetched."""
    lines = {}
    for deb in sorted(folder.glob("*.deb")):
        name, version, architecture = deb.stem.split("_")
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        lines[name] = f"{name} {unquote(version)} {architecture} {digest}"
    return lines


def _installed(folder: Path) -> dict[str, str]:
    """The version of each package that the base has."""
    lines = (folder / INSTALLED).read_text().splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def _download(
    checkout: Path,
    folder: Path,
    *,
    base: Path,
    locked: str,
    say: Callable[[str], None],
    current: bool = False,
    architecture: str = "",
) -> None:
    containers = checkout / "containers"
    with TemporaryDirectory(dir=_build(checkout), prefix=".debs-") as made:
        scratch = Path(made)
        inputs, out, work = scratch / "inputs", scratch / "out", scratch / "work"
        for each in (inputs, out, work):
            each.mkdir()
        for source in ("debian.in", "debian.sh", "debs.sh", "debs.def"):
            shutil.copy2(containers / source, inputs)
        (inputs / "debian.lock").write_text(locked)
        _host(inputs, os.environ, current=current, architecture=architecture)
        argv: list[str | Path] = [
            *PROGRAM,
            inputs / "debs.def",
            base,
            work,
            "--bind",
            inputs,
            "/mnt",
            "--bind",
            out,
            "/srv",
        ]
        binds = {inputs: False, out: True, work: True, base: False}
        with progress.watch(out, "Debian packages", say=say):
            builder.run(checkout, argv, binds=binds, on_line=say, network=True)
        builder_container.take(out)
        _require_packages(out)
        folder.parent.mkdir(parents=True, exist_ok=True)
        out.replace(folder)


def _require_packages(folder: Path) -> None:
    """Refuse a base that leaves other files than packages: a link could put a file of this machine into a bundle."""
    for path in folder.iterdir():
        known = path.suffix == ".deb" or path.name in (INSTALLED, "base.sha256")
        if not known or path.is_symlink() or not path.is_file():
            fix = "take another base, or ask the person who made this one"
            raise ConfigError(
                "a program of the base left a file that is not a package", found=ascii(path.name), fix=fix
            )


def _build(checkout: Path) -> Path:
    folder = checkout / "build"
    folder.mkdir(exist_ok=True)
    return folder


def _host(folder: Path, environment: Mapping[str, str], *, current: bool, architecture: str) -> None:
    """Write what apt needs from this machine: proxies, certificates and mirrors. None of it is kept.

    It also says what to fetch: today's packages, or those of an architecture.
    """
    (folder / "env").touch(mode=0o600)  # a proxy's address may hold a password
    given = {**docker.proxies(environment), "ARCHITECTURE": architecture, "CURRENT": "1" if current else ""}
    (folder / "env").write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in given.items()))
    if os.getuid() == 0:
        os.chown(folder / "env", *builder_container.caller())
    bundle = builder.certificates()
    if bundle:
        shutil.copyfile(bundle, folder / "ca.crt")
    (folder / "mirrors.sed").write_text(mirrors.sed())
