"""How a rank ends: a finding is printed without a traceback, and its code is the exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import NoReturn

from dray.contract import exit_codes, failures
from dray.contract.findings import ConfigError, DrayError

_AT_END: list[Callable[[], None]] = []
_FULL_GPU = "OutOfMemoryError"  # torch's own, without the seconds that torch takes
_PATIENCE_S = 5.0  # for what a dead disk keeps waiting


def at_end(do: Callable[[], None]) -> None:
    """Run this when the process exits in any way, except on SIGKILL."""
    _AT_END.append(do)


def leave(code: int) -> NoReturn:
    """Exit at once, without the interpreter's clean-up: see `guarded`."""
    last = [Thread(target=do, daemon=True) for do in _AT_END]
    for thread in last:
        thread.start()
    for thread in last:
        thread.join(_PATIENCE_S)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its disk may be full
            stream.flush()
    os._exit(code)


def say(text: str) -> None:
    """Print a line to this rank's log at once; a full disk does not end the run."""
    with suppress(OSError):
        print(text, flush=True)


def message(error: BaseException, most: int = 300) -> str:
    """What an exception says, on one line; its type where it says nothing."""
    return (" ".join(str(error).split()) or type(error).__name__)[:most]


def described(error: BaseException, most: int = 400) -> str:
    """The type of an exception and what it says, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


@contextmanager
def refusing(problem: str, *, fix: str, wanted: object = "", where: object = "") -> Iterator[None]:
    """Turn what a library raises while it loads the user's files into a ConfigError.

    A GPU without memory is no fault of theirs, nor is a disk that fails.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DrayError) or type(error).__name__ == _FULL_GPU or failures.is_machines(error):
            raise
        raise ConfigError(problem, where=where, wanted=wanted, found=described(error), fix=fix) from error


def _known(raised: Exception) -> DrayError | None:
    """The finding for what torch raises and is no defect of dray."""
    text = str(raised)
    if type(raised).__name__ == _FULL_GPU:
        traceback.print_exception(raised)  # torch says what held the memory
        return DrayError(
            "the GPU has no memory left",
            found=message(raised, 600),
            fix="batch.per_device smaller, train.activation_checkpointing = true, or more GPUs with fsdp or zero3",
        )
    if not isinstance(raised, RuntimeError):
        return None
    if "torch.use_deterministic_algorithms(" in text:
        return ConfigError(
            "an operation of this model is not deterministic on this device",
            wanted="only deterministic operations, for train.deterministic = true",
            found=" ".join(text.split(", but you set", maxsplit=1)[0].split())[:200],
            fix="train.deterministic=false, or another model.attn_implementation",
        )
    if failures.follows_peer([text]):
        traceback.print_exception(raised)
        return DrayError(
            "another rank has ended, and this rank cannot go on without it",
            found=message(raised),
            fix="dray why RUN shows the first failure; if no rank failed, check the network between the nodes",
        )
    return None


def guarded(main: Callable[..., None], *arguments: str, name: str = "") -> NoReturn:
    """Run `main` and exit without the interpreter's clean-up. `name` is printed before a finding.

    Seen with torch 2.13: the last reference to a gloo group goes while the interpreter's lock is held, its destructor
    waits for a worker thread, and that thread waits for the lock to drop a tensor. One run in ten never ended; another
    program ended with SIGABRT after all that it had to say.
    """
    code = exit_codes.DONE
    try:
        main(*arguments)
    except Exception as raised:
        error = _known(raised) or failures.unexpected_error(raised, log=True)
        code = error.finding.code
        with suppress(OSError):
            print(f"{name}{error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = exit_codes.FAILED
    leave(code)
