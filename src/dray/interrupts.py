"""Signals that end this program: when they may interrupt it, so that the `finally` blocks run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupts:
    """Whether a signal must wait, and which one waits; whether one came during the stop."""

    wait = False
    pending = 0
    hurry = False


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Hold signals back until the caller says that its command has started.

    An interrupt in the middle of Popen would leave a child that nobody waits for, and its pipes open.
    """

    def begun() -> None:
        Interrupts.wait, number = False, Interrupts.pending
        Interrupts.pending = 0
        if number:
            raise _interrupt(number)

    Interrupts.wait = True
    try:
        yield begun
    finally:
        begun()


@contextmanager
def stoppable() -> Iterator[None]:
    """Handle SIGTERM and a closed terminal (except under nohup) as Ctrl-C: the `finally` blocks run."""

    def interrupt(number: int, _frame: object) -> None:
        if not Interrupts.wait:
            raise _interrupt(number)
        Interrupts.pending = number

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught = [one for one in signals if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int) -> KeyboardInterrupt:
    """The exception for a signal; it has no text for Ctrl-C, as Python's own."""
    return KeyboardInterrupt() if number == signal.SIGINT else KeyboardInterrupt(signal.Signals(number).name)


def hurry_on_signals() -> None:
    """Until `stoppable` ends, a signal raises nothing, but kills at once what is being stopped."""

    def note(_number: int, _frame: object) -> None:
        Interrupts.hurry = True

    Interrupts.hurry = False
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)
