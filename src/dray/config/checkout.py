"""Where the project's own files are: containers/, recipes/, slurm/, build/."""

from __future__ import annotations

import os
from pathlib import Path

from dray.contract.findings import ConfigError

_MARK = "containers/steps"


def root() -> Path:
    """The checkout: DRAY_HOME if set, else the folder we stand in or one above it, else where this package lies."""
    named = os.environ.get("DRAY_HOME")
    if named:
        if (Path(named) / _MARK).is_dir():
            return Path(named).resolve()
        raise ConfigError("DRAY_HOME is not a dray checkout", found=named, wanted=f"a folder with {_MARK}/ in it")
    here = Path.cwd().resolve()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[3]):
        if (folder / _MARK).is_dir():
            return folder
    raise ConfigError(
        "no dray checkout found",
        where=here,
        wanted=f"a folder with {_MARK}/ in it",
        fix="change into your clone of dray, or set DRAY_HOME to it",
    )
