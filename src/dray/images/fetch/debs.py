"""Debian's packages, which apt fetches inside the base that they are for; the build itself needs no network."""

from __future__ import annotations

import platform
import shlex
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote

from dray.clients import builder, builder_container, docker, progress
from dray.clients.progress import Say
from dray.config import mirrors
from dray.contract.findings import ConfigError
from dray.images.fetch import sha256
from dray.images.locks import lock as locks
from dray.images.locks.lock import Pin
from dray.images.rootfs import PROGRAM
from dray.images.sif.format import MACHINES

INSTALLED = "installed"
# The last word of a lock's line, for packages of the slim image: another base may lack them or have other versions.
_OF_BASE = "base"
_READ = ("debian.in", "debian.sh", "debs.sh", "debs.def")


def lock_file(checkout: Path, architecture: str = "") -> Path:
    """The lock for an architecture, by Debian's name for it (amd64, arm64); else for this machine's."""
    machine = platform.machine()
    return checkout / "containers" / f"debian-{architecture or MACHINES.get(machine, machine)}.lock"


def fetch(checkout: Path, *, base: Path, identity: str, as_locked: bool = True, say: Say = print) -> Path:
    """The folder with the packages for this base, fetched if it is missing. Refuses packages that are not as locked."""
    lock = lock_file(checkout)
    locked = lock.read_text() if lock.exists() else ""
    texts = [(checkout / "containers" / name).read_text() for name in _READ]
    key = "\n".join([identity, locked, *texts, mirrors.sed(), "" if as_locked else "current"])
    folder = checkout / "build" / "debs" / locks.digest(key)
    if not folder.exists():
        _download(checkout, folder, base=base, locked=locked, current=not as_locked, say=say)
    moved = differences(folder, lock)
    if moved and as_locked:
        raise ConfigError(
            "Debian's packages are not as locked",
            where=lock,
            found="\n".join(moved),
            fix="--debian current (make: DEBIAN=current) takes today's packages\n"
            "or make another base: containers/base/make-base.sh bookworm build/base/bookworm.tar\n"
            "or lock again: dray image lock debian",
        )
    for difference in moved:
        say(f"dray: not as locked: {difference}")
    return folder


def update_locks(checkout: Path, *, base: Path, say: Say, check: bool = False) -> list[str]:
    """Compare today's packages with each architecture's lock; returns the changes. Writes the locks, unless `check`."""
    changes = []
    builder_container.write_for_all()
    for architecture in MACHINES.values():
        lock = lock_file(checkout, architecture)
        (checkout / "build").mkdir(exist_ok=True)
        with TemporaryDirectory(dir=checkout / "build", prefix=".debs-") as scratch:
            folder = Path(scratch) / "debs"
            _download(checkout, folder, base=base, locked="", say=say, architecture=architecture)
            installed = {pin.name for pin in _pins(folder / INSTALLED)}
            now = [
                replace(pin, hashes=(*pin.hashes, _OF_BASE)) if pin.name in installed else pin
                for pin in _fetched(folder)
            ]
        changes += [f"{architecture}: {change}" for change in locks.changes(_pins(lock), now)]
        if not check:
            lines = "".join(" ".join((pin.name, pin.version, *pin.hashes)) + "\n" for pin in now)
            lock.write_text(f"# archive {datetime.now(UTC):%Y%m%dT%H%M%SZ}\n{lines}")
    return changes


def differences(folder: Path, lock: Path) -> list[str]:
    """The packages that an image would have in another version than the lock's, or with other bytes.

    Packages that belong to the base may be newer there.
    """
    present = {pin.name: pin for pin in _fetched(folder)}
    installed = {pin.name: pin.version for pin in _pins(folder / INSTALLED)}
    locked = []
    for pin in _pins(lock):
        name = pin.name
        if name in present:
            locked.append(replace(pin, hashes=pin.hashes[:2]))
        elif _OF_BASE not in pin.hashes:
            locked.append(pin)
            if installed.get(name) == pin.version:
                present[name] = pin
            elif name in installed:
                present[name] = Pin(name, f"{installed[name]}, in the base", ())
    return locks.changes(locked, present.values())


def _pins(lock: Path) -> list[Pin]:
    """The packages of a lock; its first line has the date of Debian's archive."""
    lines = lock.read_text().splitlines() if lock.exists() else []
    fields = (line.split() for line in lines if not line.startswith("#"))
    return [Pin(name, version, tuple(rest)) for name, version, *rest in fields]


def _fetched(folder: Path) -> list[Pin]:
    """The packages that were fetched, each with its architecture and hash."""
    pins = []
    for deb in folder.glob("*.deb"):
        name, version, architecture = deb.stem.split("_")
        pins.append(Pin(name, unquote(version), (architecture, sha256(deb))))
    return sorted(pins, key=lambda pin: pin.name)


def _download(
    checkout: Path,
    folder: Path,
    *,
    base: Path,
    locked: str,
    say: Say,
    current: bool = False,
    architecture: str = "",
) -> None:
    """Fetch the locked packages, with `current` today's, or to lock them those of an `architecture`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=checkout / "build", prefix=".debs-") as scratch:
        inputs, out, work = (Path(scratch) / name for name in ("inputs", "out", "work"))
        for each in (inputs, out, work):
            each.mkdir()
        for name in _READ:
            shutil.copy2(checkout / "containers" / name, inputs)
        (inputs / "debian.lock").write_text(locked)
        _copy_settings(inputs, {"ARCHITECTURE": architecture, "CURRENT": "1" if current else ""})
        argv: list[str | Path] = [*PROGRAM, inputs / "debs.def", base, work, out]
        binds = {inputs: False, out: True, work: True, base: False}
        with progress.watch(out, "Debian packages", say=say):
            builder.run(checkout, argv, binds=binds, on_line=say, network=True)
        builder_container.take(out)
        require_files(out)
        out.replace(folder)


def require_files(folder: Path) -> None:
    """Refuse a base that leaves more than files: a link could put a file of this machine into a bundle."""
    odd = [path.name for path in folder.iterdir() if path.is_symlink() or not path.is_file()]
    if odd:
        fix = "take another base, or ask the person who made this one"
        raise ConfigError("a program of the base left a link or a folder", found=ascii(odd[0]), fix=fix)


def _copy_settings(folder: Path, values: dict[str, str]) -> None:
    """Write what apt needs from this machine beside `values`: proxies, certificates and mirrors. None of it is kept."""
    environment = folder / "env"
    environment.touch(mode=0o600)  # a proxy's address may hold a password
    values = {**docker.proxies(), **values}
    environment.write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items()))
    builder_container.give(environment)
    bundle = builder.certificates()
    if bundle:
        shutil.copyfile(bundle, folder / "ca.crt")
    (folder / "mirrors.sed").write_text(mirrors.sed())
