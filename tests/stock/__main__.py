"""Run a command, or a shell, on a machine that nobody has prepared, in a checkout of HEAD; as root:

PYTHONPATH=tests .venv/bin/python -m stock 'make image-cpu'
"""

from __future__ import annotations

import subprocess
import sys

from stock.walk import prepared

from helpers import ROOT


def main(command: str = "") -> int:
    """The command's exit code."""
    with prepared(ROOT / "build/stock-cache", ROOT / "build/stock/by-hand") as walk:
        argv = walk.machine.argv(command or "exec bash -i", folder=walk.checkout)
        return subprocess.run(argv, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
