"""Values that reach bash, srun, a script's comment or a terminal must have no control characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dray.contract import exit_codes
from dray.contract.findings import Finding

# The last ones reverse what follows them on a terminal: a name could end in the state of another run.
_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_REFUSED = re.compile(rf"[\t\n{_CONTROL}]")
_UNPRINTABLE = re.compile(f"[{_CONTROL}\ud800-\udfff]")


def control_characters(values: object, key: str = "") -> Iterator[Finding]:
    """A refusal for each text with a control character, also in nested tables and lists; `key` is their key."""
    if isinstance(values, str):
        if _REFUSED.search(values):
            yield Finding(
                "a value has a control character, such as a line break",
                where=ascii(key)[1:-1],
                wanted="one line of text: it reaches bash, srun or a comment of a script",
                found=ascii(values[:200]),
                fix="give another name or value",
                code=exit_codes.CONFIG,
            )
    elif isinstance(values, Iterable):
        for name, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            yield from control_characters(name, f"{key or 'the'} names")
            place = f"{key}[{name}]" if isinstance(name, int) else f"{key}.{name}"
            yield from control_characters(value, place.lstrip("."))


def printable(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """The value with escapes such as \\u001b for control characters, and for what JSON cannot hold."""
    if isinstance(value, str):
        return value if value.isprintable() else _UNPRINTABLE.sub(lambda match: _escape(match[0]), value)
    if isinstance(value, dict):
        return {name: printable(part) for name, part in value.items()}
    return [*map(printable, value)] if isinstance(value, list) else value


def cell(text: str) -> str:
    """The text on one line, for a row of a table."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def _escape(character: str) -> str:
    """As in JSON, so that JSON with it still means the same."""
    return json.dumps(character)[1:-1]
