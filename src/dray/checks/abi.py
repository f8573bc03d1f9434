"""`python -m dray.checks.abi [LIBRARY...]`: do the host's libraries fit this image, and whose copy is loaded?

From their headers, and not by trying: what the loader says of a library that it cannot load, NCCL keeps to itself.
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

INJECTED = Path("/.singularity.d/libs")
_MACHINE = platform.machine()
_DEFAULT = (f"/lib/{_MACHINE}-linux-gnu", f"/usr/lib/{_MACHINE}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One library of the host's."""

    library: str
    soname: str
    in_image: str
    """The image's own copy, if it has one."""
    before: str
    """Whose copy a program loads under Apptainer before 1.5 and SingularityCE: host or image."""
    since: str
    """The same under Apptainer 1.5 and newer."""
    troubles: tuple[str, ...]
    """Why it cannot be loaded."""
    doubts: tuple[str, ...] = ()
    """What was not found; the driver, or a package that is loaded first, may bring it."""


def look(libraries: Sequence[Path], *, own: Sequence[str] | None = None, configured: str | None = None) -> list[Row]:
    """Each library held against the image and the other libraries; `own` are the image's folders."""
    given = (os.environ.get("LD_LIBRARY_PATH", "") if configured is None else configured).split(":")
    first = [entry for entry in given if entry and Path(entry) != INJECTED]
    folders = [*first, *(image_folders() if own is None else own)]
    loaded = _loaded() if own is None else {}
    rows = []
    for library in libraries:
        try:
            headers = elf.read(library)
        except (elf.NotElfError, OSError) as error:
            rows.append(Row(library=str(library), soname="", in_image="", before="", since="", troubles=(str(error),)))
            continue
        copy = _find(headers.soname, folders)
        troubles, doubts = _held(headers, libraries, folders, loaded)
        # The image's own LD_LIBRARY_PATH stands before the engine's folder in both; since 1.5 all its folders do.
        before = "image" if copy and str(Path(copy).parent) in first else "host"
        rows.append(
            Row(
                library=str(library),
                soname=headers.soname,
                in_image=copy,
                before=before,
                since="image" if copy else "host",
                troubles=tuple(troubles),
                doubts=tuple(doubts),
            )
        )
    return rows


def image_folders() -> list[str]:
    """Where this image's loader looks, besides LD_LIBRARY_PATH."""
    configured = [
        line.strip()
        for file in sorted(Path("/etc/ld.so.conf.d").glob("*.conf"))
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("/")
    ]
    return list(dict.fromkeys([*configured, *_DEFAULT]))


def _loaded() -> dict[str, str]:
    """What this process has loaded already, by name: a library that needs it gets that very one."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if ".so" in line}
    return {Path(path).name: path for path in paths}


def _held(
    headers: elf.Library, libraries: Iterable[Path], folders: Sequence[str], loaded: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    if headers.machine != _MACHINE:
        return [f"is made for {headers.machine}, and this node is {_MACHINE}"], []
    beside = {path.name: str(path) for path in (*INJECTED.glob("*.so*"), *libraries)}
    troubles, doubts = [], []
    for name in headers.needed:
        # Which of two copies is taken depends on the engine's version: one that gives all is enough.
        copies = [loaded.get(name, ""), beside.get(name, ""), _find(name, [*headers.runpath, *folders])]
        copies = [copy for copy in copies if copy]
        if not copies:
            doubts.append(f"needs {name}, which is neither in the image nor put in")
            continue
        lacking = [_lacking(name, headers.wants.get(name, ()), copy) for copy in copies]
        if all(lacking):
            troubles.append(lacking[0])
    return troubles, doubts


def _lacking(name: str, wanted: Sequence[str], copy: str) -> str:
    """Which version the copy has not; one that has no versions at all is taken as it is."""
    try:
        gives = elf.read(Path(copy)).gives
    except (elf.NotElfError, OSError):
        return ""
    missing = [version for version in wanted if version not in gives] if gives else []
    if not missing:
        return ""
    family = [one for one in gives if one.split("_")[0] == missing[-1].split("_")[0]]
    return f"needs {missing[-1]} of {name}; {copy} has {max(family, key=_order, default='none of these')}"


def _find(name: str, folders: Iterable[str]) -> str:
    return next((path for folder in folders if Path(path := f"{folder}/{name}").exists()), "")


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.rpartition("_")[2].split(".") if part.isdigit())


def main(names: Sequence[str]) -> int:
    """A JSON list; 69 where a library has trouble."""
    libraries = [Path(name) for name in names] or sorted(INJECTED.glob("*.so*"))
    rows = look(libraries)
    print(json.dumps([asdict(row) for row in rows], indent=1))
    return 69 if any(row.troubles for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
