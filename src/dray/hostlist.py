"""Expand Slurm's compressed host lists, such as `n[1-3,07-10]-ib[0-1],login1`."""

from __future__ import annotations

import re
from math import prod

from dray.contract.findings import ConfigError

LIMIT = 65_536
"""Hosts in one list. Slurm accepts no more in one range, and no cluster has as many."""

_NAME = re.compile(r"(?:[^][,\s]|\[[^][]*])+")
_GAP = re.compile(r"\s*,\s*|\s+")  # scontrol separates at white space too
_DIGITS = 18  # more do not fit Slurm's own numbers
_RANGE = re.compile(rf"([0-9]{{1,{_DIGITS}}})(?:-([0-9]{{1,{_DIGITS}}}))?")


def expand(text: str) -> list[str]:
    """All hosts in the order of `scontrol show hostnames`, including repeated ones."""
    hosts: list[str] = []
    position, end = len(text) - len(text.lstrip()), len(text.rstrip())
    while name := _NAME.match(text, position, end):
        hosts += _hosts(text, name, LIMIT - len(hosts)) if "[" in name[0] else [name[0]]
        if len(hosts) > LIMIT:
            raise _too_many(text, position)
        position = name.end()
        if position == end:
            return hosts
        gap = _GAP.match(text, position, end)
        if not gap:
            break
        position = gap.end()
    raise _unexpected(text, position, end)


def _hosts(text: str, name: re.Match[str], room: int) -> list[str]:
    """In Slurm's order: the last brackets vary fastest, then the first, then the second, and so on."""
    start, *pieces = re.split(r"[][]", name[0])
    position = name.start() + len(start) + 1
    groups = []
    for inside, tail in zip(pieces[::2], pieces[1::2], strict=True):
        groups.append((_ranges(text, position, inside), tail))
        position += len(inside) + len(tail) + 2
    if prod(sum(len(numbers) for numbers, _ in ranges) for ranges, _ in groups) > room:
        raise _too_many(text, name.start())
    heads = [start]
    for ranges, tail in groups[:-1]:
        heads = [head + number + tail for number in _numbers(ranges) for head in heads]
    ranges, tail = groups[-1]
    endings = [number + tail for number in _numbers(ranges)]
    return [head + ending for head in heads for ending in endings]


def _ranges(text: str, position: int, inside: str) -> list[tuple[range, int]]:
    """Each range with the width to which its numbers are padded."""
    found = []
    for part in inside.split(","):
        bounds = _RANGE.fullmatch(part)
        if not bounds:
            problem = f"`{part}` is not a range" if part else "a range is missing"
            raise _malformed(text, position, problem, "write ranges as [7] or [07-10,12]")
        low, high = int(bounds[1]), int(bounds[2] or bounds[1])
        if high < low:
            raise _malformed(text, position, f"`{part}` runs backwards", f"write {bounds[2]}-{bounds[1]}")
        found.append((range(low, high + 1), len(bounds[1])))
        position += len(part) + 1
    return found


def _numbers(ranges: list[tuple[range, int]]) -> list[str]:
    return [f"{number:0{width}}" for numbers, width in ranges for number in numbers]


def _too_many(text: str, position: int) -> ConfigError:
    return _malformed(
        text, position, f"more than {LIMIT:,} hosts", "check the range: a number may have a digit too many"
    )


def _unexpected(text: str, position: int, end: int) -> ConfigError:
    match text[position:end][:1]:
        case "[":
            return _malformed(text, position, "this bracket is not closed", "close it with ] before the next one")
        case "]":
            return _malformed(text, position, "this bracket was not opened", "open it with [")
        case _:
            return _malformed(text, position, "a host is missing", "name one, or leave out the comma")


def _malformed(text: str, position: int, problem: str, fix: str) -> ConfigError:
    before, after = text[max(0, position - 50) : position], text[position : position + 50]
    shown = re.sub(r"\s", " ", before + after)
    return ConfigError(
        f"malformed host list: {problem}",
        where=f"column {position + 1}",
        found=f"{shown}\n{'^':>{len(before) + 1}}" if text.strip() else "nothing",
        fix=fix,
    )
