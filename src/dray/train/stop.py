"""How the trainer speaks of itself, and says no."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

EXIT_FAILED, EXIT_CONFIG = 1, 78


def say(text: str) -> None:
    """A line in this rank's log, at once."""
    print(text, flush=True)


def stop(problem: str, *, wanted: object, found: object, fix: str, code: int = EXIT_CONFIG) -> NoReturn:
    """End this rank, as a rule because of what the recipe says; the rank's keeper records it."""
    print(f"{problem}\n  wanted: {wanted}\n  found:  {found}\n  fix:    {fix}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def guarded(main: Callable[..., None], *words: str) -> NoReturn:
    """Run it, and end as it says without taking anything apart.

    Seen with torch 2.13: the last reference to a gloo group goes while the interpreter's lock is held, its destructor
    waits for a worker thread, and that thread waits for the lock to drop a tensor. One run in ten never ended; another
    program ended with SIGABRT after all that it had to say.
    """
    code = 0
    try:
        main(*words)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
