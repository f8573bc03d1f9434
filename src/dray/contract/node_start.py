"""A node's start: how long its parts take, and the variables that its container has before the runner starts.

The node's script tells the runner of the parts before it. Each is a duration by one clock of one node, which nobody
sets: CLOCK_BOOTTIME, which bash reads in /proc/uptime. Nodes' clocks differ, and one that is set would make a part
negative.
"""

from __future__ import annotations

import re
from typing import Any

STARTED = "DRAY_STARTED"
"""`boot=ID NAME=SECONDS ...`: the boot id of the clock, and the times."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"

STAGE, CONTAINER, RENDEZVOUS, PREFLIGHT = "stage", "container", "rendezvous", "preflight"
RANK = IMPORT, GROUPS, MODEL, CHECKPOINT, COMPILE, FIRST_STEP = (
    "import", "process_groups", "model", "checkpoint", "compile", "first_step",
)  # fmt: skip
"""The parts that ranks of dray's trainer report, in the order of contract.heartbeat's marks."""
NAMES = {
    "queue": "queue", "plan": "planning", "srun": "srun", STAGE: "image staged", CONTAINER: "container",
    RENDEZVOUS: "rendezvous", PREFLIGHT: "preflight", IMPORT: "launcher and imports", GROUPS: "process groups",
    MODEL: "datasets and model", CHECKPOINT: "checkpoint", COMPILE: "compile", FIRST_STEP: "first step",
}  # fmt: skip
"""All parts, with their names in messages and reports."""
PARTS = tuple(NAMES)
NODE = PARTS[1:]
"""The parts of a node. Only the first node, where the job's script runs, knows the first two."""
OWN = (STAGE, CONTAINER, IMPORT, MODEL, CHECKPOINT, COMPILE)
"""The parts in which a node works alone; in the others it may wait for other nodes."""
SBCAST = "sbcast"
"""Beside the parts, for the first node: how long sbcast took to send the image to the disks of all nodes."""
TFLOPS = "tflops"
"""Beside the parts: TFLOP/s of the node's slowest GPU in matrix products of 16 bits."""

_EARLY = ("PATH", "PREPEND_PATH", "APPEND_PATH")
"""The engine looks for python3 in PATH; Apptainer makes it of all three."""
_EARLY_PREFIXES = ("PYTHON", "LD_", "NVIDIA_")
"""The runner's own Python reads PYTHONPATH when it starts. Apptainer adds the host's libraries to LD_LIBRARY_PATH, and
NVIDIA's hooks read their own variables."""
_LONGEST = 1e7  # seconds: four months, which no job lasts


def valid_parts(told: object) -> dict[str, float]:
    """The valid durations of a node's parts, without values that are negative, absurd, no numbers or unknown."""
    if not isinstance(told, dict):
        return {}
    durations = {}
    for name in (*NODE, SBCAST, TFLOPS):
        value: Any = told.get(name)
        if type(value) in (int, float) and 0 <= value < _LONGEST:
            durations[name] = round(float(value), 3)
    return durations


def parts_before_runner(text: str, boot: str, runner: float) -> dict[str, float]:
    """The parts before the runner began (at `runner`), without those of another clock or in the wrong order."""
    fields = dict(re.findall(r"(\w+)=(\S+)", text))
    if not boot or fields.get("boot") != boot:
        return {}
    times = {name: float(value) for name, value in fields.items() if re.fullmatch(r"[0-9]{1,18}\.[0-9]+", value)}
    times["runner"] = runner

    def lasted(begin: str, end: str) -> float:
        return times[end] - times[begin] if {begin, end} <= times.keys() else -1.0

    stage = lasted("staging", "staged")
    parts = {STAGE: stage, CONTAINER: lasted("began", "runner") - max(stage, 0.0)}
    if fields.get("asked_boot") == boot:
        parts |= {"plan": lasted("begun", "planned"), "srun": lasted("asked", "began")}
        if stage >= 0:
            parts[SBCAST] = lasted("planned", "asked")
    return valid_parts(parts)


def is_early(name: str) -> bool:
    """Whether the container has this variable of the plan before the runner starts, which sets all others."""
    return name in _EARLY or name.startswith(_EARLY_PREFIXES)
