"""Lists of cores, as the kernel and Slurm write them: 0-3,8."""

from __future__ import annotations

from collections.abc import Iterable


def parse(text: str) -> list[int]:
    """The cores of a list."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def render(cores: Iterable[int]) -> str:
    """As `parse` reads it."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
