"""uv resolves requirements to locks, and checks that an index has wheels for every machine and Python."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import process
from dray.config.image_definition import Image
from dray.contract import files
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.images.locks import lock as locks
from dray.images.locks.lock import SOURCE_ONLY, Pin

# With a folder of wheels, whose build of torch comes out would be that folder's choice. And uv, unlike pip, knows
# nothing of this machine's own certificates unless it is told; older ones call it native TLS.
ENVIRONMENT = {"UV_FIND_LINKS": "", "UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
_MACHINES, _PLATFORM = ("x86_64", "aarch64"), "manylinux_2_28"
# dray builds images with the first of their Pythons; sites move on to newer ones.
_IMAGES, _HOSTS = ("3.11", "3.12"), ("3.11", "3.12", "3.13", "3.14")
_BINARY = ("--only-binary", ":all:", "--no-binary", SOURCE_ONLY)
_EXTRAS = ("train", "check", "dev", "docs", "cotainr")
# What only torch's builds for CUDA need.
_FOR_CUDA = re.compile(r"nvidia-.*|cuda-.*|triton")
_VERSION = re.compile(r"[\w.-]+==[\w.+!]+")
_HASHED = "--require-hashes --constraint containers/venv.lock"


def update(checkout: Path, image: Image | None, *, upgrade: bool = False) -> list[str]:
    """Resolve the locks of an image, or else of .venv, again. Returns what changed, a line for each package."""
    changes = []
    for lock in locks.of(checkout, image):
        lines = _resolved(checkout, lock, image, upgrade=upgrade)
        if image is None:
            lines = _with_cpu_torch(lines, checkout)
        else:
            pins = locks.parse(lines)
            if lock.name == locks.MAIN:
                pins = _with_vendors(pins, lock, image)
            lines = "".join(f"{pin}\n" for pin in pins)
        changes += locks.write(lock, locks.origins(lock, image), lines)
    return changes


def _resolved(checkout: Path, lock: Path, image: Image | None, *, upgrade: bool) -> str:
    """The lines of uv. It keeps to the versions in a lock that is there, and to their hashes, even to a wrong one."""
    before = files.text(lock, lock.name) if lock.exists() else ""
    if locks.is_edited(before):
        versions = (f"{pin.name}=={pin.version}" for pin in locks.parse(before))
        before = "".join(f"{version}\n" for version in versions if _VERSION.fullmatch(version))
    with TemporaryDirectory(prefix="dray-") as scratch:
        out = Path(scratch) / lock.name
        out.write_text(before, encoding="utf-8")
        argv = [*compiler(), *(["--upgrade"] if upgrade else []), "--output-file", str(out)]
        argv += _of_image(checkout, lock, image) if image else _of_venv(checkout)
        done = process.run(argv, env=ENVIRONMENT, check=False)
        if done.code != 0:
            where = lock.with_suffix(".in").relative_to(checkout) if image else "pyproject.toml"
            raise unsolved(str(where), done.err)
        return out.read_text(encoding="utf-8")


def _of_image(checkout: Path, lock: Path, image: Image) -> list[str]:
    sources = [str(lock.with_suffix(".in"))]
    if lock.name == locks.MAIN:
        sources.append(str(checkout / "pyproject.toml"))
    return ["--python-version", image.python, "--python-platform", f"x86_64-{_PLATFORM}", *_BINARY, *sources]


def _of_venv(checkout: Path) -> list[str]:
    """For every Python and system, in the versions of the cpu image."""
    extras = (word for extra in _EXTRAS for word in ("--extra", extra))
    options = ["--universal", "--python-version", _HOSTS[0], "--constraint", str(_cpu(checkout))]
    return [*options, *extras, str(checkout / "pyproject.toml")]


def _with_vendors(pins: Sequence[Pin], lock: Path, image: Image) -> list[Pin]:
    """Replace the registry's wheels by the vendors'; a vendor's torch drops libraries that only the other one needs."""
    kept = {pin.name: pin for pin in pins}
    if any(vendor.name == "torch" for vendor in image.vendor):
        asked = {re.split(r"[^\w.-]", line)[0] for _, lines in locks.requirements(lock) for line in lines}
        kept = {name: pin for name, pin in kept.items() if name in asked or not _FOR_CUDA.fullmatch(name)}
    for vendor in image.vendor:
        # On a CPU any build of torch serves: `make demo` takes the one that is installed.
        version = vendor.version.partition("+")[0] if image.accelerator == "cpu" else vendor.version
        kept[vendor.name] = Pin(vendor.name, version, tuple(vendor.sha256))
    return [kept[name] for name in sorted(kept)]


def _with_cpu_torch(lines: str, checkout: Path) -> str:
    """Add the vendor's torch for the CPU to the registry's: pip's own configuration decides which one it finds."""
    (torch,) = (pin for pin in locks.read(_cpu(checkout)) if pin.name == "torch")
    first = f"torch=={torch.version} \\\n"
    ours = "".join(f"    --hash=sha256:{digest} \\\n" for digest in torch.hashes if digest not in lines)
    return lines.replace(first, first + ours)


def _cpu(checkout: Path) -> Path:
    return checkout / "containers" / "cpu" / locks.MAIN


def coverage(checkout: Path, image: Image | None) -> Iterator[str]:
    """Refuse a lock without a wheel of each package for each machine and Python. Yields a line for each of these.

    Vendors' wheels are left out: another index has them. dray asks the index of the rest, and fetches nothing.
    """
    paths = locks.of(checkout, image)
    text = "".join(files.text(path, path.name) for path in paths)
    pythons: tuple[str, ...] = _HOSTS
    alone = True
    if image:
        others = {SOURCE_ONLY, *(vendor.name for vendor in image.vendor)}
        pins = {pin.name: pin for pin in locks.parse(text) if pin.name not in others}
        text = "".join(f"{pin}\n" for pin in pins.values())
        pythons = _IMAGES
        alone = bool(image.vendor)
    with TemporaryDirectory(prefix="dray-") as scratch:
        file = Path(scratch) / "requirements.txt"
        file.write_text(text, encoding="utf-8")
        for machine, python in product(_MACHINES, pythons):
            argv = [
                *(_program(), "pip", "install", "--quiet", "--dry-run", "--require-hashes", "--only-binary", ":all:"),
                *("--python-version", python, "--python-platform", f"{machine}-{_PLATFORM}"),
                *("--target", f"{scratch}/target", "--requirement", str(file), *(["--no-deps"] if alone else [])),
            ]
            done = process.run(argv, env=ENVIRONMENT, check=False)
            if done.code != 0:
                raise unsolved(
                    str(paths[0]),
                    re.sub(r"\n\s*", "\n", done.err),
                    problem=f"the lock lacks wheels for {machine} with Python {python}",
                    fix=f"dray image lock {locks.name(paths[0])}; or change the requirement that has no such wheel",
                )
            yield f"every wheel for {machine}, Python {python}"


def compiler() -> list[str]:
    """The command that resolves requirements to versions and hashes."""
    return [_program(), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"]


def _program() -> str:
    beside = Path(sys.executable).with_name("uv")
    uv = process.which("uv") or (str(beside) if beside.exists() else None)
    if not uv:
        python = shlex.quote(sys.executable)
        raise UnfitError("locking needs uv", where=sys.executable, fix=f"{python} -m pip install {_HASHED} uv")
    return uv


def unsolved(
    where: str,
    text: str,
    *,
    problem: str = "no set of packages fits these requirements",
    fix: str = "change the requirement; a package without wheels needs its own step in the build",
) -> DrayError:
    """The error if uv finds no set of packages, with what to do."""
    if "Failed to fetch" in text:
        fix = "try again; or set UV_DEFAULT_INDEX to a mirror: uv does not read pip's configuration"
        return DrayError("uv cannot reach the package index", where=where, found=text.strip(), fix=fix)
    return ConfigError(problem, where=where, found=text.strip(), fix=fix)
