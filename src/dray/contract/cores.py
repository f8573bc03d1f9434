"""Lists of cores, as the kernel and Slurm write them: 0-3,8."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT = 8192
"""The most CPUs that Linux supports on one machine."""


def parse(text: str) -> list[int]:
    """The cores of a list; ValueError if a number or the count exceeds LIMIT."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if max(low, high) >= LIMIT:
            raise ValueError(f"{part[:40]}: cores are numbered from 0 to {LIMIT - 1}")
        cores += range(low, high + 1)
        if len(cores) > LIMIT:
            raise ValueError(f"more than {LIMIT} cores in one list")
    return cores


def render(cores: Iterable[int]) -> str:
    """The list as text, which `parse` reads."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
