"""Names of hosts in Slurm's short form: `n[1-3,7]-ib0`, as `sbatch --exclude` takes it."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.DOTALL)


def compress(names: Iterable[str]) -> str:
    """The names in short form, each once; names that differ only in their last number share a pair of brackets."""
    families: dict[tuple[str, str, int], set[int]] = {}
    plain: dict[str, None] = {}
    for name in names:
        if found := _NUMBERED.fullmatch(name):
            head, number, tail = found.groups()
            padded = len(number) if number[0] == "0" else 0
            families.setdefault((head, tail, padded), set()).add(int(number))
        else:
            plain[name] = None
    return ",".join([*(_family(*family, sorted(numbers)) for family, numbers in families.items()), *plain])


def _family(head: str, tail: str, width: int, numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [f"{low:0{width}}" + f"-{high:0{width}}" * (high > low) for low, high in runs]
    return f"{head}{shown[0]}{tail}" if len(numbers) == 1 else f"{head}[{','.join(shown)}]{tail}"
