"""Make a root filesystem with Apptainer, and pack it as a SIF or a Docker image. Runs in the builder container too.

Standard library only: the builder has nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from dray.clients import apptainer
from dray.contract import exit_codes
from dray.contract.findings import DrayError

# The program of this package, and what it leaves in its scratch folder.
# -P: nothing of the folder where it starts is imported.
PROGRAM = ("python3", "-P", "-m", "dray.images.rootfs")
ROOTFS = "rootfs"
SIF = "image.sif"
LAYER = "image.tar"
TOOLS = "tools.json"


def run(main: Callable[[], None]) -> int:
    """The exit code of a program in the builder; an error is its last line."""
    try:
        main()
    except DrayError as error:
        print(apptainer.to_line(error))
        return error.exit_code
    except OSError as error:
        print(f"{error.filename}: {error.strerror}")
        return exit_codes.FAILED
    return exit_codes.DONE
