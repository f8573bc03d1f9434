"""The one form of every refusal, warning and check: the problem, what was wanted, what was found, where, the fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from dray.contract import exit_codes

_ENCODED = "dray-error: "


def counted(number: float, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number:.9g} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """The duration in its two largest units: `3 h 12 min`."""
    whole = int(seconds)
    for size, unit, part_size, part_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            part = whole % size // part_size
            return f"{whole // size} {unit}" + (f" {part} {part_unit}" if part else "")
    return f"{whole} s"


def measured(seconds: float) -> str:
    """A measured time: `340 ms`, `2.5 s`; from 100 s on as `duration`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.1f} s" if round(seconds, 1) < 100 else duration(seconds)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like `name`; empty if none is."""
    return next(iter(difflib.get_close_matches(name, [*known], n=1)), "")


def listed(names: Iterable[str], most: int = 5) -> str:
    """`a, b, c, d, e and 28 more`."""
    names = [*names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Finding(NamedTuple):
    """A problem or warning; in a list of checks `problem` is what was checked, and `found` the result."""

    problem: str
    where: str = ""
    wanted: str = ""
    found: str = ""
    fix: str = ""
    code: int = exit_codes.DONE
    """The exit code with which the run ends; with 0 the run continues."""
    node: str = ""
    rank: int | None = None
    source: str = ""
    """Where the rule comes from."""
    kind: Literal["ok", "skip", "note", "warning"] = "warning"
    """The kind of a finding that stops nothing (code 0)."""

    @property
    def level(self) -> Literal["ok", "skip", "note", "warning", "error"]:
        """`error` if it stops the run, else its kind."""
        return "error" if self.code else self.kind

    def line(self) -> str:
        """The finding in a list of checks: `ok    torch: 2.13.0`, and its details in the lines below."""
        head = f"{self.level:<8}{self.problem}"
        if self.found:
            head += ": " + _indented(self.found, 8)
        return head + self._details(8, "where", "wanted", "fix", "source")

    def data(self) -> dict[str, Any]:
        """The finding for JSON: its level and all fields that are not empty."""
        fields = self._asdict()
        del fields["code"], fields["kind"]
        return {"level": self.level, **{name: value for name, value in fields.items() if value not in ("", None)}}

    def __str__(self) -> str:
        return self.problem + self._details(2, "where", "wanted", "found", "fix")

    def _details(self, margin: int, *names: str) -> str:
        text = ""
        for name in names:
            if value := getattr(self, name):
                text += f"\n{'':{margin}}{name + ':':<8}" + _indented(value, margin + 8)
        return text


def _indented(text: str, margin: int) -> str:
    """The text with a margin before each line but the first."""
    return f"\n{'':{margin}}".join(text.splitlines())


class DrayError(Exception):
    """Something failed. The message is complete: nobody needs a traceback to act on it."""

    exit_code = exit_codes.FAILED

    def __init__(
        self,
        problem: str,
        *,
        where: object = "",
        wanted: object = "",
        found: object = "",
        fix: str | None = "",
        code: int | None = None,
        node: str = "",
        rank: int | None = None,
    ) -> None:
        super().__init__(problem)
        where, wanted, found, fix = ("" if text is None else str(text) for text in (where, wanted, found, fix))
        code = self.exit_code if code is None else code
        self.finding = Finding(problem, where, wanted, found, fix, code, node, rank)

    @property
    def problem(self) -> str:
        """The first line of the message."""
        return self.finding.problem

    @property
    def details(self) -> dict[str, str]:
        """The lines after the first, by name."""
        named = self.finding._asdict()
        return {name: named[name] for name in ("where", "wanted", "found", "fix") if named[name]}

    def amend(self, *, where: object = "", found: object = "", fix: str = "") -> None:
        """Add details that only the caller knows."""
        known = self.finding
        self.finding = known._replace(
            where=str(where or known.where), found=str(found or known.found), fix=fix or known.fix
        )

    def __str__(self) -> str:
        return str(self.finding)


class ConfigError(DrayError):
    """What the user wrote cannot run as it stands."""

    exit_code = exit_codes.CONFIG


class UnfitError(DrayError):
    """This machine, node or fabric lacks something that the run needs."""

    exit_code = exit_codes.UNFIT


class RetryError(DrayError):
    """Nothing is wrong with the run; it may succeed if started again."""

    exit_code = exit_codes.RETRY


def error(finding: Finding | dict[str, Any]) -> DrayError:
    """The exception for a finding, of the class that fits its code."""
    finding = finding if isinstance(finding, Finding) else Finding(**finding)
    kinds = {kind.exit_code: kind for kind in (ConfigError, UnfitError, RetryError)}
    raised = kinds.get(finding.code, DrayError)(finding.problem)
    raised.finding = finding
    return raised


def encode(finding: Finding) -> str:
    """A finding as a line of a program's output, for the dray that has started it."""
    return _ENCODED + json.dumps(finding._asdict())


def decode(line: str) -> Finding | None:
    """The finding in a line of output, if it is one."""
    try:
        return Finding(**json.loads(line.removeprefix(_ENCODED))) if line.startswith(_ENCODED) else None
    except (ValueError, TypeError):  # a program of the base may print anything
        return None
