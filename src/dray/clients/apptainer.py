"""Apptainer by its name on this machine, and how a program that runs it reports an error. Standard library only."""

from __future__ import annotations

import json

from dray import process
from dray.contract.findings import DrayError, Finding

_ERROR = "dray-error: "


def program() -> str | None:
    """The program's name on this machine; sites keep the old one for a long time."""
    return next((name for name in ("apptainer", "singularity") if process.which(name)), None)


def to_line(error: DrayError) -> str:
    """An error as one line of output, for the caller on the host."""
    return _ERROR + json.dumps(error.finding._asdict())


def from_line(line: str) -> Finding | None:
    """The finding in a line of output, if it is one."""
    if not line.startswith(_ERROR):
        return None
    try:
        return Finding(**json.loads(line.removeprefix(_ERROR)))
    except (ValueError, TypeError):  # a program of the base may print anything
        return None
