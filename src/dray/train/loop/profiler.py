"""Profile some steps of rank 0 with torch.profiler: a trace, and a table of the longest kernels in the log."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import profile

from dray.contract.run_folder import PROFILE_TRACE
from dray.train import ranks
from dray.train.config import Config
from dray.train.errors import message, say


class Profiler:
    """Profile the steps of `train.profile`, if the run takes the first of them."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._trace, self._device = Path(config.folder) / PROFILE_TRACE, device
        self._first = self._last = 0
        if config.train.profile and ranks.rank() == 0:
            first, last = config.train.profile.split("-")
            self._first, self._last = int(first), min(int(last), config.steps)
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Start before the first of the steps."""
        if step == self._first:
            if self._device.type != "cpu":
                torch.cuda.synchronize(self._device)  # the GPU is behind the host: else earlier kernels count
            self._profile = profile()
            self._profile.start()

    def after(self, step: int) -> None:
        """Stop after the last of them, and write the trace while the other ranks wait."""
        if self._profile is None or step != self._last:
            return
        self._profile.stop()
        sort = "self_cpu_time_total" if self._device.type == "cpu" else "self_device_time_total"
        try:
            self._profile.export_chrome_trace(str(self._trace))
            table = self._profile.key_averages().table(sort_by=sort, row_limit=20)
            say(f"steps {self._first} to {self._last} are profiled: {self._trace}\n{table}")
        except (OSError, RuntimeError) as error:  # a full disk does not end the run
            say(f"WARNING: steps {self._first} to {self._last} are not profiled: {message(error)}")
