"""Profile some steps of rank 0 with torch.profiler: a trace, and a table of the longest kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import profile

from dray.contract import files
from dray.contract.run_folder import PROFILE, PROFILE_TRACE
from dray.train import ranks
from dray.train.config import Config
from dray.train.errors import message, say


class Profiler:
    """Profiles the steps of `train.profile`. A run that resumes after the first of them profiles nothing."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._trace, self._device = Path(config.folder) / PROFILE_TRACE, device
        self._first = self._last = 0
        if config.train.profile and ranks.rank() == 0:
            self._first, last = map(int, config.train.profile.split("-"))
            self._last = min(last, config.steps)
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Start before the first of the steps."""
        if step == self._first:
            if self._device.type != "cpu":
                torch.cuda.synchronize(self._device)  # the GPU is behind the host: else earlier kernels count
            self._profile = profile()
            with self._warning():
                self._profile.start()

    def after(self, step: int) -> None:
        """Stop after the last of them, and write the trace while the other ranks wait."""
        if self._profile is None or step != self._last:
            return
        with self._warning():
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._trace))
            kernels = {"first_step": self._first, "last_step": self._last, "rank": 0}
            kernels |= table(self._profile.key_averages())
            files.write_atomic(self._trace.with_name(PROFILE), json.dumps(kernels))
            say(f"steps {self._first} to {self._last} are profiled: {self._trace}")
        self._profile = None  # frees all events of the trace

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Give up with a warning, so that neither a full disk nor a failing profiler ends the run."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            say(f"WARNING: steps {self._first} to {self._last} are not profiled: {message(error)}")
            self._trace.unlink(missing_ok=True)
            self._profile = None


_ROWS = 20
_NAME_LENGTH = 300  # C++ templates make the names of kernels long


def table(averages: Any) -> dict[str, Any]:  # noqa: ANN401  torch's list of averages
    """Return the longest kernels of the GPU, or without any the longest operators of the CPU; each by its own time."""
    events = [event for event in averages if not event.is_user_annotation]
    kernels = [event for event in events if event.device_type != DeviceType.CPU]
    times = [(event.self_device_time_total, event) for event in kernels]
    if not kernels:
        times = [(event.self_cpu_time_total, event) for event in events]
    total = sum(time for time, _ in times)
    times.sort(key=lambda pair: -pair[0])
    rows = [
        {
            "name": event.key[:_NAME_LENGTH],
            "calls": event.count,
            "ms": round(time / 1000, 3),
            "share": round(time / total, 4) if total else 0.0,
        }
        for time, event in times[:_ROWS]
    ]
    return {"kind": "kernels" if kernels else "operators", "total_ms": round(total / 1000, 3), "rows": rows}
