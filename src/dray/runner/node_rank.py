"""This node's number, from the variables of its own task, checked against the plan; and its command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from dray.contract.findings import ConfigError, listed
from dray.runner.plan import Environ, Plan, World


def index(world: World, environ: Environ) -> int:
    """This node's number in the plan. ConfigError: the plan expects another node."""
    names, nodes = world["identity"], world["nodes"]
    variables = [names[key] for key in ("nodes", "node", "name")]
    places = {(str(len(nodes)), str(place), node["name"]): place for place, node in enumerate(nodes)}
    found = tuple(environ.get(name, "") for name in variables)
    if found not in places:
        raise ConfigError(
            "this task is not a node of the plan",
            wanted=listed(_settings(variables, values) for values in places),
            found=_settings(variables, found),
            fix="start node.sh with one task on each node of the plan: srun --nodes=N --ntasks-per-node=1; "
            "do not export these variables before it: each task has its own",
        )
    return places[found]


def _settings(names: list[str], values: Sequence[str]) -> str:
    return " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def require(plan: Plan, environ: Environ) -> None:
    """Refuse a command that cannot start in the container, before every rank fails with it."""
    first, *rest = plan["command"]
    folder, path = plan["where"], environ.get("PATH", os.defpath)
    script = os.path.join(folder, *rest[:1])
    if script.endswith(".py") and not os.path.exists(script):
        raise _not_there(rest[0], f"a file {script}")
    places, wanted = path.split(os.pathsep), f"{first} on PATH ({path})"
    if "/" in first:
        places, wanted = [folder], f"a file {os.path.join(folder, first)}"
    files = [file for place in places if os.path.isfile(file := os.path.join(place, first))]
    if not files:
        raise _not_there(first, wanted)
    file = next((file for file in files if os.access(file, os.X_OK)), "")
    if not file:
        raise ConfigError(
            f"the program is not executable: {first}",
            wanted="an executable file; or python, bash or another interpreter before its name",
            found=f"mode {os.stat(files[0]).st_mode & 0o7777:o} of {files[0]}",
            fix=f"chmod +x {shlex.quote(files[0])}",
        )
    interpreter = _interpreter(file)
    if interpreter and not os.path.exists(interpreter):
        raise ConfigError(
            f"the first line of the program names an interpreter that is not in the container: {first}",
            where=file,
            wanted="an interpreter of the image, such as #!/usr/bin/env python3",
            found=ascii(f"#!{interpreter}"),
            fix="correct that line; if it ends with \\r, a line end of Windows: sed -i 's/\\r$//' FILE",
        )


def _not_there(word: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"the program is not in the container: {word}",
        wanted=wanted,
        found="no such file in the container",
        fix="correct the path. The container sees the folder where you submit, the recipe's folders and the binds "
        "that dray plan -v lists; [[binds]] in a site file add others (docs/launch.md)",
    )


def _interpreter(file: str) -> str:
    """The program after `#!` in the first line, as the kernel reads it; empty without `#!`."""
    try:
        with open(file, "rb") as program:
            line = program.readline(256).decode(errors="replace").rstrip("\n")
    except OSError:  # it may be executed, and not read
        return ""
    return line[2:].strip(" ").partition(" ")[0] if line.startswith("#!") else ""
