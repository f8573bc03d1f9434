"""The parts of a start, and how a node's script tells the runner of those before it.

Each is a duration by one clock of one node, which nobody sets: CLOCK_BOOTTIME, which bash reads in /proc/uptime. Nodes'
clocks differ, and one that is set would make a part negative.
"""

from __future__ import annotations

VARIABLE = "DRAY_STARTED"
"""`boot=ID step=N NAME=SECONDS ...`: the boot id of the clock, the number of Slurm's step, and the times."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"

STAGE, CONTAINER, RENDEZVOUS, PREFLIGHT = "stage", "container", "rendezvous", "preflight"
RANK = IMPORT, GROUPS, MODEL, CHECKPOINT, COMPILE, FIRST_STEP = (
    "import", "process_groups", "model", "checkpoint", "compile", "first_step",
)  # fmt: skip
"""The parts that ranks of dray's trainer report, in the order of contract.heartbeat's marks."""
NODE = ("plan", "srun", STAGE, CONTAINER, RENDEZVOUS, PREFLIGHT, *RANK)
"""The parts of a node. Only the first node, where the job's script runs, knows the first two."""
OWN = (STAGE, CONTAINER, IMPORT, MODEL, CHECKPOINT, COMPILE)
"""The parts in which a node works alone; in the others it may wait for other nodes."""
PARTS = ("queue", *NODE)
NAMES = {
    "queue": "queue", "plan": "planning", "srun": "srun", STAGE: "image staged", CONTAINER: "container",
    RENDEZVOUS: "rendezvous", PREFLIGHT: "preflight", IMPORT: "launcher and imports", GROUPS: "process groups",
    MODEL: "datasets and model", CHECKPOINT: "checkpoint", COMPILE: "compile", FIRST_STEP: "first step",
}  # fmt: skip
"""Their names in messages and reports."""
SBCAST = "sbcast"
"""Beside the parts, for the first node: how long sbcast took to send the image to the disks of all nodes."""
TFLOPS = "tflops"
"""Beside the parts: TFLOP/s of the node's slowest GPU in matrix products of 16 bits."""

_MOST = {TFLOPS: 1e6}
_LONGEST = 1e7  # seconds: four months, which no job lasts


def clean(told: object) -> dict[str, float]:
    """The valid durations of a node's parts, without values that are negative, absurd, no numbers or unknown."""
    if not isinstance(told, dict):
        return {}
    found = {}
    for name in (*NODE, SBCAST, TFLOPS):
        value = told.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST.get(name, _LONGEST):
            found[name] = round(float(value), 3)
    return found


def before(text: str, boot: str, runner: float) -> dict[str, float]:
    """The parts before the runner began (at `runner`), without those of another clock or in the wrong order."""
    fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
    if not boot or fields.get("boot") != boot:
        return {}
    at = {name: _seconds(fields.get(name, "")) for name in ("begun", "planned", "asked", "began", "staging", "staged")}
    same_machine = fields.get("asked_boot") == boot
    stage = _between(at["staging"], at["staged"])
    whole = _between(at["began"], runner)
    parts = {
        "plan": _between(at["begun"], at["planned"]) if same_machine else None,
        "srun": _between(at["asked"], at["began"]) if same_machine else None,
        SBCAST: _between(at["planned"], at["asked"]) if same_machine and stage is not None else None,
        STAGE: stage,
        CONTAINER: None if whole is None or (stage or 0.0) > whole else whole - (stage or 0.0),
    }
    return clean(parts)


def step(text: str) -> str:
    """The number of the Slurm step in which the node's script ran; empty if there was none."""
    found = next((word[5:] for word in text.split() if word.startswith("step=")), "")
    return found if found.isascii() and found.isdigit() and len(found) < 12 else ""


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None or end < begin else end - begin


def _seconds(text: str) -> float | None:
    """As /proc/uptime has them."""
    plain = text.isascii() and text.replace(".", "", 1).isdigit() and len(text) < 20
    return float(text) if plain else None
