"""Numbers in short form: cores as the kernel and Slurm write them (0-3,8), and names of hosts (`n[1-3,7]-ib0`)."""

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
    return _ranges(cores, "d")


def compress_hosts(names: Iterable[str]) -> str:
    """The names as `sbatch --exclude` takes them, each once.

    Those that differ only in their last number share a pair of brackets.
    """
    import re  # noqa: PLC0415  the supervisor of each rank imports this file, and has no names of hosts

    numbered = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.DOTALL)
    families: dict[tuple[str, str, int], set[int]] = {}
    plain: dict[str, None] = {}
    for name in names:
        if match := numbered.fullmatch(name):
            head, number, tail = match.groups()
            width = len(number) if number[0] == "0" else 0
            families.setdefault((head, tail, width), set()).add(int(number))
        else:
            plain[name] = None
    short = []
    for (head, tail, width), numbers in families.items():
        shown = _ranges(numbers, f"0{width}")
        short.append(f"{head}{shown}{tail}" if len(numbers) == 1 else f"{head}[{shown}]{tail}")
    return ",".join([*short, *plain])


def _ranges(numbers: Iterable[int], form: str) -> str:
    """Numbers as `0-3,8`, each in the format `form`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(format(end, form) for end in run) for run in runs)
