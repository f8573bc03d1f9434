"""This node's number, from the variables of its own task, checked against the plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from dray.contract.findings import ConfigError, counted


def index(world: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """This node's number in the plan. ConfigError: the plan expects another node."""
    names = world["identity"]
    nodes = world["nodes"]
    count = _number(names["nodes"], environ)
    if count != len(nodes):
        raise ConfigError(
            f"the plan has another number of nodes than {names['nodes']}",
            wanted=counted(len(nodes), "node"),
            found=f"{names['nodes']}={count}",
            fix="start node.sh with one task on each node of the plan: srun --nodes=N --ntasks-per-node=1",
        )
    number = _number(names["node"], environ)
    if not 0 <= number < count:
        raise ConfigError(
            f"{names['node']} is not a node of the plan",
            wanted=f"0 to {count - 1}",
            found=f"{names['node']}={number}",
            fix="start node.sh through srun, which numbers the nodes",
        )
    name = environ.get(names["name"], "")
    if name != nodes[number]["name"]:
        raise ConfigError(
            f"this node has number {number}, which is another host in the plan",
            wanted=f"node {number} is {nodes[number]['name']}",
            found=f"{names['name']}={name or '(not set)'}, {names['node']}={number}",
            fix=f"do not export {names['node']} before srun: each node takes it from its own task",
        )
    return number


def require(plan: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Refuse a command that cannot start in the container, before every rank fails with it."""
    first, *rest = plan["command"]
    folder, path = plan["where"], environ.get("PATH", os.defpath)
    for script in (word for word in rest[:1] if word.endswith(".py")):
        if not os.path.exists(os.path.join(folder, script)):
            raise _not_there(script, f"a file {os.path.join(folder, script)}")
    file = _program(first, folder, path)
    if file is None and "/" in first:
        raise _not_there(first, f"a file {os.path.join(folder, first)}")
    if file is None:
        raise _not_there(first, f"{first} on PATH ({path})")
    if not os.access(file, os.X_OK):
        raise ConfigError(
            f"the program is not executable: {first}",
            wanted="an executable file; or python, bash or another interpreter before its name",
            found=f"mode {os.stat(file).st_mode & 0o7777:o} of {file}",
            fix=f"chmod +x {shlex.quote(file)}",
        )
    interpreter = _interpreter(file)
    for word in interpreter[:2] if interpreter[:1] == ["/usr/bin/env"] else interpreter[:1]:
        if _program(word, "/", path) is None:
            raise ConfigError(
                f"the first line of the program names an interpreter that is not in the container: {first}",
                where=file,
                wanted="an interpreter of the image, such as #!/usr/bin/env python3",
                found=ascii("#!" + " ".join(interpreter)),
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


def _program(word: str, folder: str, path: str) -> str | None:
    """The file that a shell in that folder would start; a file that is not executable only if named by its path."""
    if "/" in word:
        file = os.path.join(folder, word)
        return file if os.path.isfile(file) else None
    files = (os.path.join(place, word) for place in path.split(os.pathsep))
    return next((file for file in files if os.path.isfile(file) and os.access(file, os.X_OK)), None)


def _interpreter(file: str) -> list[str]:
    """The words after `#!` in the first line, as the kernel reads them; empty without `#!`."""
    try:
        with open(file, "rb") as program:
            line = program.readline(256).decode(errors="replace")
    except OSError:  # it may be executed, and not read
        return []
    return line[2:].rstrip("\n").split(" ") if line.startswith("#!") else []


def _number(name: str, environ: Mapping[str, str]) -> int:
    value = environ.get(name)
    if value is None or not value.isdigit():
        raise ConfigError(
            f"{name} is not a number",
            wanted=f"{name}=0 or more",
            found=f"{name}={value}" if value is not None else f"{name} is not set",
            fix="start node.sh through srun; the container engine must pass this variable on",
        )
    return int(value)
