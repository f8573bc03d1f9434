"""The one form of every refusal, warning and check: the problem, what was wanted, what was found, where, the fix."""

from __future__ import annotations

from typing import Any, NamedTuple

from dray.contract import exit_codes


class Finding(NamedTuple):
    """What is wrong or unwise. `code` is what the run ends with; 0 is a warning, and the run goes on."""

    problem: str
    where: str = ""
    wanted: str = ""
    found: str = ""
    fix: str = ""
    code: int = exit_codes.DONE
    node: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        lines = [self.problem]
        for name in ("where", "wanted", "found", "fix"):
            text = getattr(self, name)
            if text:
                first, *rest = text.splitlines()
                lines.append(f"  {name + ':':<8}{first}")
                lines += [f"{'':<10}{line}" for line in rest]
        return "\n".join(lines)


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
        """Add what only a caller knows."""
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
    """Nothing is wrong with the run; the same again may succeed."""

    exit_code = exit_codes.RETRY


def error(finding: Finding | dict[str, Any]) -> DrayError:
    """The error that a finding is, of the kind that its code says."""
    finding = finding if isinstance(finding, Finding) else Finding(**finding)
    kinds = {kind.exit_code: kind for kind in (ConfigError, UnfitError, RetryError)}
    raised = kinds.get(finding.code, DrayError)(finding.problem)
    raised.finding = finding
    return raised
