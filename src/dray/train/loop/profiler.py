"""Profile some steps of rank 0 with torch.profiler: a trace, and a table of the longest kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dray.contract import files
from dray.contract.run_folder import PROFILE, PROFILE_TRACE
from dray.train import ranks
from dray.train.config import Config
from dray.train.errors import message, say

_MOST = 20  # rows of the table
_NAME = 300  # letters of a kernel's name, which C++ templates make long
_PATIENCE_S = 60.0  # for a trace that is still written when the run ends


class Profiler:
    """Profile the steps of `train.profile`. It never ends a run: what fails is a line in the log."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._folder, self._device, self._steps = Path(config.folder), device, config.steps
        self._asked = config.train.profile if ranks.rank() == 0 else ""
        self._first = self._last = 0
        self._profile: profile | None = None
        self._writer: Thread | None = None

    def begin(self, taken: int) -> None:
        """Choose the steps to profile, of those after step `taken`; also after a return to a checkpoint."""
        if self._profile:  # what is half done before a return is left out
            self._try(self._profile.stop)
            self._profile = None
        if not self._asked:
            return
        first, last = map(int, self._asked.split("-"))
        self._first, self._last = max(first, taken + 1), min(last, self._steps)
        if self._first > self._last:
            self._last = 0
            reason = (
                f"the run has {self._steps} steps" if first > self._steps else f"the run goes on after step {taken}"
            )
            say(f"nothing is profiled: train.profile = {self._asked}, and {reason}")

    def before(self, step: int) -> None:
        """Start before the first of the steps."""
        if self._last and step == self._first:
            self._try(self._start)

    def after(self, step: int) -> None:
        """Stop after the last of them; a thread then writes the files, so that no rank waits for these."""
        if self._profile and step == self._last:
            self._try(self._stop)

    def close(self) -> None:
        """Wait for the files."""
        if self._writer:
            self._writer.join(_PATIENCE_S)

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # whatever fails, the run goes on
            self._profile = None
            reason = message(error)
            say(f"WARNING: steps {self._first} to {self._last} are not profiled: {reason}")

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type != "cpu":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self._device)  # the GPU is behind the host: else kernels of earlier steps count
        profiler = profile(activities=activities)
        profiler.start()
        self._profile = profiler

    def _stop(self) -> None:
        assert self._profile is not None
        profiler, self._profile = self._profile, None
        profiler.stop()  # synchronizes the GPU
        first, last = self._first, self._last
        self._writer = Thread(target=lambda: self._try(lambda: self._write(profiler, first, last)), daemon=True)
        self._writer.start()

    def _write(self, profiler: profile, first: int, last: int) -> None:
        trace = self._folder / PROFILE_TRACE
        part = trace.with_name(f"part-{trace.name}")
        try:
            profiler.export_chrome_trace(str(part))
            part.replace(trace)
        finally:
            part.unlink(missing_ok=True)
        found = {"first_step": first, "last_step": last, "rank": 0, **table(profiler.key_averages())}
        files.write_atomic(self._folder / PROFILE, json.dumps(found))
        say(f"steps {first} to {last} are profiled: {trace}")


def table(averages: Any) -> dict[str, Any]:  # noqa: ANN401  torch's list of averages
    """The longest kernels of the GPU, or without any the longest operators of the CPU, with their own time alone."""
    events = [event for event in averages if not event.is_user_annotation]
    kernels = [event for event in events if event.device_type != DeviceType.CPU]
    times = [(event.self_device_time_total, event) for event in kernels]
    if not kernels:
        times = [(event.self_cpu_time_total, event) for event in events]
    total = sum(time for time, _ in times)
    times.sort(key=lambda pair: -pair[0])
    rows = [
        {
            "name": event.key[:_NAME],
            "calls": event.count,
            "ms": round(time / 1000, 3),
            "share": round(time / total, 4) if total else 0.0,
        }
        for time, event in times[:_MOST]
    ]
    return {"kind": "kernels" if kernels else "operators", "total_ms": round(total / 1000, 3), "rows": rows}
