"""Every error a user meets: what was wanted, what was found, where, and the fix.

The exit code is part of the contract: 78 the configuration is wrong, 69 a node or the fabric is unfit,
75 try again. Anything else failed.
"""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_UNFIT = 69
EXIT_CONFIG = 78
_ORDER = ("where", "wanted", "found", "fix")


class DrayError(Exception):
    """Something failed. The message is complete: nobody needs a traceback to act on it."""

    exit_code = EXIT_FAILED

    def __init__(
        self,
        problem: str,
        *,
        where: object = None,
        wanted: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        self.problem = problem
        self.details = {
            name: str(value)
            for name, value in (("where", where), ("wanted", wanted), ("found", found), ("fix", fix))
            if value is not None
        }
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [self.problem]
        for name in sorted(self.details, key=_ORDER.index):
            first, *rest = self.details[name].splitlines() or [""]
            lines.append(f"  {name + ':':<8}{first}")
            lines += [f"{'':<10}{line}" for line in rest]
        return "\n".join(lines)


class ConfigError(DrayError):
    """What the user wrote cannot be run as it stands."""

    exit_code = EXIT_CONFIG


class UnfitError(DrayError):
    """This machine, node or fabric lacks something that the run needs."""

    exit_code = EXIT_UNFIT
