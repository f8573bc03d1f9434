"""A rank's heartbeat: 128 bytes in the node's own folder, which the rank maps and writes, and its node's runner reads.

Whole numbers of 8 bytes, little-endian: the process id of the rank's program, which its supervisor writes (below 0 once
it has ended), then what the program writes: its step, its phase, a limit, and the time; then how long each part of its
start took. Nothing of it is on a shared disk, and a write costs no system call.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

VARIABLE = "DRAY_HEARTBEAT"
"""The variable with the path of the file, for the rank."""
FOLDER = "DRAY_HEARTBEATS"
"""The variable with the path of the folder, for the rank's supervisor."""
SIZE = 128
PROGRAM = struct.Struct("<q")
BEAT, BEAT_AT = struct.Struct("<4q"), PROGRAM.size
"""Step, phase, limit (the most seconds to the next beat; 0: the recipe's hang_timeout_s), CLOCK_MONOTONIC in ns."""
MARK, MARKS_AT = struct.Struct("<q"), 64
IMPORTED, GROUPS, MODEL, LOAD, COMPILED, FIRST_STEP = MARKS = range(6)
"""In nanoseconds; 0 until they are known. IMPORTED is CLOCK_BOOTTIME after all imports. The others are durations: to
make the process groups, to read datasets and make the model, to read the checkpoint, to compile, and to take the first
step without compiling."""

START, COMPILE, STEP, CHECKPOINT, EVALUATE, END = range(6)
LEAST = {START: 3600, COMPILE: 1800, STEP: 600, CHECKPOINT: 1800, EVALUATE: 1800, END: 3600}
"""The smallest limit of each phase of dray's trainer, in seconds. At the start it tokenizes and reads weights. A
checkpoint waits for the previous one. At the end it saves a model."""
PHASES = ("start", "compile", "step", "checkpoint", "evaluate", "end")


def path(folder: str, rank: int | str) -> str:
    """The file of this rank."""
    return f"{folder}/beat-{rank}"


def socket(beat: str) -> str:
    """The socket beside a rank's heartbeat, on which its torch tells which collectives it is in."""
    return f"{beat}.socket"


def clear(folder: str, ranks: Iterable[int]) -> None:
    """Remove those of the start before: a supervisor that was killed has not written that its rank has ended."""
    for rank in ranks:
        beat = path(folder, rank)
        for left in (beat, socket(beat)):
            if os.path.lexists(left):
                os.unlink(left)


def ended(code: int) -> bytes:
    """The content of PROGRAM once the program has ended."""
    return PROGRAM.pack(-1 - abs(code))
