"""SIGUSR1 or SIGTERM asks a rank to end: all ranks agree on the step after which they save and end.

Steps pay nothing for it. Once asked, each rank says which step it is in, and they end after the latest of these: no
rank has passed that step, and all can reach it. A thread answers, since the main thread may be in a collective that
waits for others.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from threading import Event, Lock, Thread

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from dray.contract import exit_codes
from dray.train import ranks
from dray.train.errors import leave, say

# How long a rank waits until all have the signal. Short for SIGTERM, which also ends the ranks of a failed run.
_PATIENCE = {signal.SIGUSR1: timedelta(seconds=60), signal.SIGTERM: timedelta(seconds=3)}
_MORE = timedelta(seconds=2)
_NEVER = -1


class Stop:
    """Listen for the signals from the start. Before the first step nothing needs saving: exit at once."""

    def __init__(self) -> None:
        self._lock, self._agreed = Lock(), Event()
        self._asked = False
        self._step: int | None = None  # the one that is being taken
        self._last = self._at = _NEVER  # the run's last step, and the one after which it ends
        self._pipe, written = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(written, False)
        # The number comes through the pipe also while the main thread waits in a collective, and runs no handler.
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        for number in _PATIENCE:
            signal.signal(number, lambda _number, _frame: None)
        Thread(target=self._listen, daemon=True).start()

    def begin(self, step: int, last: int) -> None:
        """Note that `step` of `last` steps are taken."""
        with self._lock:
            self._step, self._last = step, last

    def after(self, step: int) -> bool:
        """Whether the run ends after this step; the main thread asks after each step."""
        with self._lock:
            if not self._asked:
                self._step = step + 1
                return False
        self._agreed.wait()
        return step == self._at

    def _listen(self) -> None:
        while True:
            for number in map(signal.Signals, os.read(self._pipe, 1)):
                if number in _PATIENCE and not self._ends(number):
                    leave(128 + number)

    def _ends(self, number: signal.Signals) -> bool:
        """Whether the main thread goes on: to the agreed step, or, after SIGUSR1, without one. Else exit at once."""
        with self._lock:
            first, self._asked = not self._asked, True
        if self._step is None:
            say(f"asked to end by {number.name} before the first step: there is nothing to save")
            leave(exit_codes.RETRY)
        if first:
            # In a thread: torch asks the store's server even after its own deadline, and that server may be stopped.
            answer = ThreadPoolExecutor(1).submit(self._agree, _PATIENCE[number])
            with suppress(RuntimeError, TimeoutError):  # torch raises the first kind, also for a store that is gone
                self._at = answer.result((_PATIENCE[number] + 2 * _MORE).total_seconds())
            self._agreed.set()
            step = f"after step {min(self._at, self._last)}"
            say(f"asked to end by {number.name}: {'not all ranks have heard it' if self._at == _NEVER else step}")
        return self._at != _NEVER or number == signal.SIGUSR1

    def _agree(self, patience: timedelta) -> int:
        """Return the step. It is past the last one if a rank has already finished training: then nothing stops."""
        store, world = PrefixStore("dray/stop", _get_default_store()), range(ranks.world())
        store.set(str(ranks.rank()), str(self._step))
        if ranks.rank() == 0:
            store.wait([str(rank) for rank in world], patience)
            store.set("at", str(max(int(store.get(str(rank))) for rank in world)))
        store.wait(["at"], patience + _MORE)
        return int(store.get("at"))
