"""Debian's packages, fetched by apt in the very base that they are for; the build itself then needs no network."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote

from dray.containers import builder, sandbox
from dray.contract.findings import ConfigError
from dray.images import progress
from dray.images.rootfs import PROGRAM

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def lock_file(checkout: Path, architecture: str = "") -> Path:
    """What is locked for machines of this architecture, in Debian's word for it; else for such as this one."""
    machine = platform.machine()
    return checkout / "containers" / f"debian-{architecture or _ARCHITECTURES.get(machine, machine)}.lock"


def fetch(
    checkout: Path, *, base: Path, identity: str, as_locked: bool = True, say: Callable[[str], None] = print
) -> Path:
    """The folder with the packages for this base, fetched if it is not there yet; refused if they are not as locked."""
    containers = checkout / "containers"
    sources = _sources()
    path = lock_file(checkout)
    locked = path.read_text() if path.exists() else ""
    asked = [identity, locked, *((containers / name).read_text() for name in ("debian.in", "debs.sh"))]
    asked += [sources.read_text()] if sources else []
    folder = checkout / "build" / "debs" / hashlib.sha256("\n".join(asked).encode()).hexdigest()[:16]
    if not folder.exists():
        say("dray: Debian packages")
        _download(checkout, folder, base=base, locked=locked, say=say)
    moved = differences(folder, path)
    if moved and as_locked:
        raise ConfigError(
            "Debian's packages are not as locked",
            where=path,
            found="\n".join(moved),
            fix="APT_SOURCES=FILE, a sources.list with a snapshot of the lock's date;\n"
            "or dray image lock debian, which locks these; or --debian current (make: DEBIAN=current) to take them",
        )
    for difference in moved:
        say(f"dray: not as locked: {difference}")
    return folder


def lock(checkout: Path, *, base: Path, say: Callable[[str], None], check: bool = False) -> list[str]:
    """What has changed in today's sources, for each architecture; its lock is written, unless this is a `check`."""
    changed = []
    for architecture in _ARCHITECTURES.values():
        path = lock_file(checkout, architecture)
        with TemporaryDirectory(dir=_build(checkout), prefix=".debs-") as scratch:
            folder = Path(scratch) / "debs"
            _download(checkout, folder, base=base, locked="", say=say, architecture=architecture)
            changed += [f"{architecture}: {one}" for one in differences(folder, path)]
            if not check:
                path.write_text("".join(f"{line}\n" for line in _found(folder)))
    return changed


def differences(folder: Path, lock: Path) -> list[str]:
    """What is there in another version than the lock's, or with other bytes."""
    written = lock.read_text() if lock.exists() else ""
    locked = {line.split()[0]: line for line in written.splitlines()}
    found = {line.split()[0]: line for line in _found(folder)}
    return [
        f"{name} {_version(locked.get(name))} -> {_version(found.get(name))}"
        for name in sorted(locked.keys() | found.keys())
        if locked.get(name) != found.get(name)
    ]


def _version(line: str | None) -> str:
    return line.split()[1] if line else "none"


def _found(folder: Path) -> list[str]:
    """NAME VERSION ARCHITECTURE SHA256 of each package."""
    lines = []
    for deb in sorted(folder.glob("*.deb")):
        name, version, architecture = deb.stem.split("_")
        lines.append(f"{name} {unquote(version)} {architecture} {hashlib.sha256(deb.read_bytes()).hexdigest()}")
    return lines


def _download(
    checkout: Path, folder: Path, *, base: Path, locked: str, say: Callable[[str], None], architecture: str = ""
) -> None:
    containers = checkout / "containers"
    with TemporaryDirectory(dir=_build(checkout), prefix=".debs-") as made:
        scratch = Path(made)
        inputs, out, work = scratch / "inputs", scratch / "out", scratch / "work"
        for each in (inputs, out, work):
            each.mkdir()
        for source in ("debian.in", "debs.sh", "debs.def"):
            shutil.copy2(containers / source, inputs)
        (inputs / "debian.lock").write_text(locked)
        _host(inputs, os.environ, architecture)
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
        folder.parent.mkdir(parents=True, exist_ok=True)
        out.replace(folder)


def _build(checkout: Path) -> Path:
    folder = checkout / "build"
    folder.mkdir(exist_ok=True)
    return folder


def _host(folder: Path, environment: Mapping[str, str], architecture: str = "") -> None:
    """What apt needs of this machine: the proxies, the certificates, sources of the user's own. None of it is kept.

    And the architecture, where that is another one.
    """
    (folder / "env").touch(mode=0o600)  # a proxy's address may hold a password
    given = {**builder.proxies(environment), "ARCHITECTURE": architecture}
    (folder / "env").write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in given.items()))
    if os.getuid() == 0:
        os.chown(folder / "env", *sandbox.caller())
    bundle = builder.certificates()
    if bundle:
        shutil.copyfile(bundle, folder / "ca.crt")
    sources = _sources()
    if sources:
        shutil.copyfile(sources, folder / "sources.list")


def _sources() -> Path | None:
    """A sources.list of the user's own, such as that of a snapshot."""
    named = os.environ.get("APT_SOURCES")
    if named and not Path(named).is_file():
        raise ConfigError("apt's sources are not there", where="APT_SOURCES", found=named)
    return Path(named) if named else None
