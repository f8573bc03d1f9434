"""Lists of cores, as the kernel and Slurm write them: 0-3,8."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT = 8192
"""The most CPUs that Linux supports on one machine."""


def parse(text: str) -> list[int]:
    """The cores of a list; ValueError if there are more than LIMIT, or one has a larger number."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        end = int(last or first)
        if end >= LIMIT:
            raise ValueError(f"{part[:40]}: cores are numbered from 0 to {LIMIT - 1}")
        cores += range(int(first), end + 1)
        if len(cores) > LIMIT:
            raise ValueError(f"more than {LIMIT} cores")
    return cores


def render(cores: Iterable[int]) -> str:
    """The list as text, which `parse` reads."""
    return ranges(cores, "d")


def ranges(numbers: Iterable[int], form: str) -> str:
    """Numbers as `0-3,8`, each in the format `form`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(format(end, form) for end in run) for run in runs)
