"""Values that reach bash, srun or a comment of a script: each is one line, without control characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping

from dray.contract import exit_codes
from dray.contract.findings import Finding


def control_characters(values: object, key: str = "") -> Iterator[Finding]:
    """A refusal for each text in these values that has one; tables and lists are looked through, under `key`."""
    if isinstance(values, str):
        if any(unicodedata.category(character) == "Cc" for character in values):
            yield Finding(
                "a value has a control character, such as a line break",
                where=ascii(key)[1:-1],
                wanted="one line of text: it reaches bash, srun or a comment of a script",
                found=ascii(values[:200]),
                fix="give another name or value",
                code=exit_codes.CONFIG,
            )
    elif isinstance(values, Mapping):
        for name, value in values.items():
            yield from control_characters(name, f"{key or 'the'} names")
            yield from control_characters(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, Iterable):
        for number, value in enumerate(values):
            yield from control_characters(value, f"{key}[{number}]")
