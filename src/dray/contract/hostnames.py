"""Names of hosts in Slurm's short form: `n[1-3,7]-ib0`, as `sbatch --exclude` takes it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dray.contract.cores import ranges

_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.DOTALL)


def compress(names: Iterable[str]) -> str:
    """The names in short form, each once; names that differ only in their last number share a pair of brackets."""
    families: dict[tuple[str, str, int], set[int]] = {}
    plain: dict[str, None] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            head, number, tail = match.groups()
            width = len(number) if number[0] == "0" else 0
            families.setdefault((head, tail, width), set()).add(int(number))
        else:
            plain[name] = None
    short = []
    for (head, tail, width), numbers in families.items():
        shown = ranges(numbers, f"0{width}")
        short.append(f"{head}{shown}{tail}" if len(numbers) == 1 else f"{head}[{shown}]{tail}")
    return ",".join([*short, *plain])
