"""`python -m dray.checks.host_libraries [LIBRARY...]`: check that the host's libraries fit this image.

The image's own loader says it, which maps the libraries as for ldd, and runs nothing of them. NCCL hides its errors.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dray.contract import exit_codes
from dray.contract.findings import UnfitError

INJECTED = Path("/.singularity.d/libs")
_MACHINE = platform.machine()
_DEFAULT = (f"/lib/{_MACHINE}-linux-gnu", f"/usr/lib/{_MACHINE}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_VERSION = re.compile(r"(\S+): version `(\S+)' not found \(required by (\S+)\)")
_MISSING = re.compile(r"(\S+) => not found")


class Library(NamedTuple):
    """A library of the host, compared with the image."""

    path: str
    in_image: str
    """The image's own copy, if it has one."""
    problems: list[str]
    """Why the library cannot be loaded."""
    unresolved: list[str]
    """Libraries that were not found; the driver, or a package that is loaded earlier, may have them."""


def require(plan: Mapping[str, Any], node: str) -> None:
    """Require that the host's libraries which node.sh has bound, and the plugin, fit this image."""
    fabric = plan["fabric"]
    if fabric["strategy"] != "host":
        return
    # The folder also has the driver's libraries, which the engine binds and no site names.
    bound = [path for pattern in fabric["libraries"] for path in INJECTED.glob(Path(pattern).name)]
    named = os.environ.get("NCCL_NET_PLUGIN", "") if fabric["plugin"] else ""
    plugin = [Path(named)] if named.startswith("/") else []  # a recipe may say none
    for library in check([*bound, *plugin]):
        if library.problems:
            raise UnfitError(
                f"{library.path} of {node} does not fit this image",
                wanted=f"a library that the image can load ({plan['site']})",
                found="; ".join(library.problems),
                fix="add what it needs to fabric.libraries, or use an image with its own libraries; see docs/sites.md",
                node=node,
            )


def check(libraries: Sequence[Path]) -> list[Library]:
    """Compare each library with the image and with the others."""
    entries, folders = os.environ.get("LD_LIBRARY_PATH", "").split(":"), image_folders()
    library_path = [entry for entry in entries if entry and Path(entry) != INJECTED]
    host = [str(INJECTED), *(str(path.parent) for path in libraries)]
    rows = []
    for path in libraries:
        copies = [f"{folder}/{path.name}" for folder in (*library_path, *folders)]
        copy = next(filter(os.path.exists, copies), "")
        # The image's LD_LIBRARY_PATH comes before the engine's folder; since 1.5 the image's other folders do, too.
        orders = [*library_path, *host, *folders], [*library_path, *folders, *host]
        answers = [_ask(path, order) for order in orders]
        rows.append(Library(str(path), copy, *min(answers, key=lambda answer: len(answer[0]))))
    return rows


def _ask(library: Path, folders: Sequence[str]) -> tuple[list[str], list[str]]:
    """What the loader says if it searches in these folders: why the library does not fit, and what is not found."""
    if not library.exists():
        return ["does not exist"], []
    loaded = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    loader = next(path for path in loaded if Path(path).name.startswith("ld-"))
    # A conda environment brings a newer one than the image's folders have, and this process has loaded it.
    preload = ":".join(path for path in loaded if Path(path).name.startswith("libstdc++"))
    argv = [loader, "--library-path", ":".join(folders), str(library)]
    env = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_PRELOAD": preload}  # as ldd does it, which not every image has
    done = subprocess.run(argv, env=env, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603
    output = done.stdout + done.stderr
    lacking = [
        f"needs {version} of {Path(copy).name}; {copy} lacks it"
        for copy, version, needs in _VERSION.findall(output)
        if needs == str(library)
    ]
    unresolved = [f"needs {name}, which is neither in the image nor bound" for name in _MISSING.findall(output)]
    if done.returncode and not lacking:
        lacking = [done.stderr.strip().rpartition("libraries: ")[2] or f"the loader ends with {done.returncode}"]
    return lacking, unresolved


def image_folders() -> list[str]:
    """The folders that this image's loader searches after LD_LIBRARY_PATH."""
    files = sorted(Path("/etc/ld.so.conf.d").glob("*.conf"))
    lines = [line.strip() for file in files for line in file.read_text(errors="replace").splitlines()]
    return [*(line for line in lines if line.startswith("/")), *_DEFAULT]


def main(names: Sequence[str]) -> int:
    """Print a JSON list; 69 if a library cannot be loaded."""
    libraries = check([Path(name) for name in names] or sorted(INJECTED.glob("*.so*")))
    print(json.dumps([library._asdict() for library in libraries], indent=1))
    return exit_codes.UNFIT if any(library.problems for library in libraries) else exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
