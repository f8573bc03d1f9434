"""`python -m dray.checks.abi [LIBRARY...]`: check that the host's libraries fit this image, and which copy is loaded.

It reads their headers and loads nothing: NCCL hides the loader's errors.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dray.checks import elf
from dray.contract import exit_codes

INJECTED = Path("/.singularity.d/libs")
_MACHINE = platform.machine()
# rdma-core: a driver of network cards is libmlx5-rdmav34.so and needs IBVERBS_PRIVATE_34, which one libibverbs has.
_VERBS, _DRIVERS = "libibverbs.so.1", "lib*-rdmav*.so"
_DEFAULT = (f"/lib/{_MACHINE}-linux-gnu", f"/usr/lib/{_MACHINE}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library of the host, compared with the image."""

    path: str
    soname: str = ""
    in_image: str = ""
    """The image's own copy, if it has one."""
    before: str = ""
    """Which copy a program loads under Apptainer before 1.5 and SingularityCE: host or image."""
    since: str = ""
    """The same under Apptainer 1.5 and newer."""
    problems: tuple[str, ...] = ()
    """Why the library cannot be loaded."""
    unresolved: tuple[str, ...] = ()
    """Libraries that were not found; the driver, or a package that is loaded earlier, may have them."""


def check(
    libraries: Sequence[Path], *, own: Sequence[str] | None = None, configured: str | None = None
) -> list[Library]:
    """Compare each library with the image and with the others; `own` are the image's library folders."""
    entries = (os.environ.get("LD_LIBRARY_PATH", "") if configured is None else configured).split(":")
    library_path = [entry for entry in entries if entry and Path(entry) != INJECTED]
    folders = [*library_path, *(image_folders() if own is None else own)]
    loaded = _loaded() if own is None else {}
    checked = []
    for library in libraries:
        try:
            headers = elf.read(library)
        except (elf.NotElfError, OSError) as error:
            problem = "does not exist" if isinstance(error, FileNotFoundError) else str(error)
            checked.append(Library(path=str(library), problems=(problem,)))
            continue
        copy = _find(headers.soname, folders)
        problems, unresolved = _needs(headers, libraries, folders, loaded)
        # The image's LD_LIBRARY_PATH comes before the engine's folder; since 1.5 the image's other folders do, too.
        before = "image" if copy and str(Path(copy).parent) in library_path else "host"
        if headers.soname == _VERBS and before == "host":
            problems += _without_drivers(library, libraries, folders)
        checked.append(
            Library(
                path=str(library),
                soname=headers.soname,
                in_image=copy,
                before=before,
                since="image" if copy else "host",
                problems=tuple(problems),
                unresolved=tuple(unresolved),
            )
        )
    return checked


def _without_drivers(verbs: Path, libraries: Iterable[Path], folders: Iterable[str]) -> list[str]:
    """The problem that no driver of a card fits the host's libibverbs: both must be of one version of rdma-core."""
    own = [driver for folder in folders for driver in sorted(Path(folder, "libibverbs").glob(_DRIVERS))]
    bound = [library for library in libraries if library.match(_DRIVERS)]
    lacking = [_lacking(_VERBS, elf.read(driver).needed_versions.get(_VERBS, ()), str(verbs)) for driver in own + bound]
    if not lacking or not all(lacking):
        return []
    return [f"no driver of a network card fits it: {own[0].name if own else bound[0].name} {lacking[0]}"]


def image_folders() -> list[str]:
    """The folders that this image's loader searches after LD_LIBRARY_PATH."""
    configured = [
        line.strip()
        for file in sorted(Path("/etc/ld.so.conf.d").glob("*.conf"))
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("/")
    ]
    return list(dict.fromkeys([*configured, *_DEFAULT]))


def _loaded() -> dict[str, str]:
    """The libraries that this process has loaded, by name: another library that needs one gets that copy."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if ".so" in line}
    return {Path(path).name: path for path in paths}


def _needs(
    headers: elf.Library, libraries: Iterable[Path], folders: Sequence[str], loaded: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    if headers.machine != _MACHINE:
        return [f"is built for {headers.machine}, and this node is {_MACHINE}"], []
    beside = {path.name: str(path) for path in (*INJECTED.glob("*.so*"), *libraries)}
    problems, unresolved = [], []
    for name in headers.needed:
        # Which of two copies is loaded depends on the engine's version: one that has all is enough.
        copies = [loaded.get(name, ""), beside.get(name, ""), _find(name, [*headers.runpath, *folders])]
        copies = [copy for copy in copies if copy]
        if not copies:
            unresolved.append(f"needs {name}, which is neither in the image nor bound")
            continue
        lacking = [_lacking(name, headers.needed_versions.get(name, ()), copy) for copy in copies]
        if all(lacking):
            problems.append(lacking[0])
    return problems, unresolved


def _lacking(name: str, wanted: Sequence[str], copy: str) -> str:
    """The version that the copy lacks. The loader accepts a copy without any versions."""
    try:
        versions = elf.read(Path(copy)).versions
    except (elf.NotElfError, OSError):
        return ""
    missing = [version for version in wanted if version not in versions] if versions else []
    if not missing:
        return ""
    family = [one for one in versions if one.split("_")[0] == missing[-1].split("_")[0]]
    return f"needs {missing[-1]} of {name}; {copy} has {max(family, key=_order, default='none of these')}"


def _find(name: str, folders: Iterable[str]) -> str:
    return next((path for folder in folders if Path(path := f"{folder}/{name}").exists()), "")


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.rpartition("_")[2].split(".") if part.isdigit())


def main(names: Sequence[str]) -> int:
    """Print a JSON list; 69 if a library cannot be loaded."""
    libraries = check([Path(name) for name in names] or sorted(INJECTED.glob("*.so*")))
    print(json.dumps([asdict(library) for library in libraries], indent=1))
    return exit_codes.UNFIT if any(library.problems for library in libraries) else exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
