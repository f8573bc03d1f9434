"""How the trainer speaks of itself, and says no."""

from __future__ import annotations

import sys
from typing import NoReturn

EXIT_FAILED, EXIT_CONFIG = 1, 78


def say(text: str) -> None:
    """A line in this rank's log, at once."""
    print(text, flush=True)


def stop(problem: str, *, wanted: object, found: object, fix: str, code: int = EXIT_CONFIG) -> NoReturn:
    """End this rank, as a rule because of what the recipe says; the rank's keeper records it."""
    print(f"{problem}\n  wanted: {wanted}\n  found:  {found}\n  fix:    {fix}", file=sys.stderr, flush=True)
    raise SystemExit(code)
