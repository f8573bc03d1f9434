"""metrics.jsonl: one JSON object a line, written by rank 0 as it happens. docs/reference/metrics.md is its schema."""

from __future__ import annotations

import json
import math
import resource
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

import torch

from dray.contract import hardware
from dray.contract.run_folder import METRICS, TRACKERS
from dray.train import ranks
from dray.train.config import Config
from dray.train.errors import say
from dray.train.loop.trackers import Tracked, Trackers, require
from dray.train.model.layers import experts, heads
from dray.train.parallel.base import Strategy

# A loss jumps if it is far above those of the log lines before.
_MOST_LINES, _LEAST_LINES = 32, 8
_DEVIATIONS = 8.0  # standard deviations above the median, estimated by medians, which outliers hardly move
_LEAST_DEVIATION = 0.01  # of the median: a few lines may agree by chance


class Metrics:
    """Writes metrics.jsonl, TensorBoard, the recipe's trackers, and a line in every rank's log."""

    def __init__(self, config: Config, *, writes: bool) -> None:
        self._config, self._file = config, None
        self._trackers: Trackers | None = None
        self._lock = Lock()  # threads that write checkpoints write lines, too
        self._unwritten = b""  # lines that a full disk has not taken yet
        if writes:
            require(
                config.train.trackers,
                "add it in a layer (dray image layer IMAGE --pip {}), or remove it from train.trackers",
            )
            self._file = (Path(config.folder) / METRICS).open("ab", buffering=0)

    def write(self, event: str, shown: str, **fields: Any) -> None:  # noqa: ANN401  any JSON value
        """Write one line at once, so that `tail -f` can follow. Every rank prints `shown` into its own log."""
        say(shown)
        if self._file is None:
            return
        with self._lock:
            line = {"event": event, "time": round(time.time(), 3), **fields}
            line = json.loads(json.dumps(line), parse_constant=lambda _: None)  # NaN and Inf become null
            self._unwritten += json.dumps(line).encode() + b"\n"
            with suppress(OSError):  # a full disk does not end the run: the line comes with the next one that fits
                while self._unwritten:
                    self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            if event == "start":
                config = self._config
                run = Tracked(config.name, config.run, Path(config.run_folder, TRACKERS), fields["first_step"])
                self._trackers = Trackers(dict.fromkeys(("tensorboard", *config.train.trackers)), run)
            if self._trackers and "step" in fields:
                self._trackers.log(line)

    def close(self) -> None:
        """Let the trackers finish."""
        if self._trackers:
            self._trackers.close()


class Speed:
    """Measures the speed and the waits of training, between two log lines."""

    def __init__(self, config: Config, strategy: Strategy) -> None:
        self.config, self.device = config, strategy.device
        self._flops = cache(partial(flops_per_token, strategy.network, config))
        self._peak = _peak(strategy.device, config.train.precision)

    def begin(self, first: int) -> None:
        """Start measuring before the first step."""
        self._first_step = self._since = first
        self._began = self._last = time.monotonic()
        self._spent = {"data_s": 0.0, "checkpoint_s": 0.0, "evaluation": 0.0}

    @contextmanager
    def spent(self, on: str) -> Iterator[None]:
        """Add the time of this block to data_s or checkpoint_s, or to the evaluations, which step_s leaves out."""
        began = time.monotonic()
        yield
        self._spent[on] += time.monotonic() - began

    def measured(self, taken: int) -> dict[str, Any]:
        """Return the fields of a `step` line, measured since the last one."""
        now, config = time.monotonic(), self.config
        steps, seconds = taken - self._since, now - self._last - self._spent["evaluation"]
        tokens_per_s = steps * config.step_tokens / seconds
        left = (now - self._began) / (taken - self._first_step) * (config.steps - taken)
        figures = {
            "tokens_per_s": round(tokens_per_s, 1),
            "step_s": round(seconds / steps, 5),
            "data_s": round(self._spent["data_s"], 4),
            "checkpoint_s": round(self._spent["checkpoint_s"], 4),
            "memory_gb": round(_memory(self.device) / 1e9, 3),
            "seconds_left": round(left, 1),
        }
        if self._peak:
            flops = sum(self._flops(config.row_length(step)) for step in range(self._since, taken)) / steps
            figures["mfu"] = round(tokens_per_s / ranks.world() * flops / self._peak, 4)
        self._since, self._last, self._spent = taken, now, dict.fromkeys(self._spent, 0.0)
        return figures


class Jumps:
    """Finds losses far above those of the log lines before; the same on every rank."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_MOST_LINES)
        self._high = False

    def median_before(self, loss: float) -> float | None:
        """Return the median of the lines before if this loss jumps; of several in a row only for the first."""
        before = [*self._losses]
        self._losses.append(loss)
        if len(before) < _LEAST_LINES:
            return None
        middle = median(before)
        # Of the changes from line to line: a loss that falls steadily is far from its median too.
        deviation = max(
            1.4826 * median(abs(after - line) for line, after in pairwise(before)), _LEAST_DEVIATION * abs(middle)
        )
        was_high, self._high = self._high, loss > middle + _DEVIATIONS * deviation
        return middle if self._high and not was_high else None


def flops_per_token(network: Any, config: Config, length: int) -> float:  # noqa: ANN401  a transformers model
    """Return the FLOPs of a token in rows of `length`: 6 for each multiplied weight, 4 if it is frozen, plus attention.

    Attention counts whole, also where it is causal: so do PaLM, nanoGPT, Megatron-LM and torchtitan.
    """
    settings = network.config.get_text_config()
    expert_count, active_count = experts(settings)
    predicted = config.train.mlm_probability if config.train.objective == "masked" else 1.0
    table = network.get_input_embeddings().weight
    head = table if network.config.tie_word_embeddings else getattr(network.get_output_embeddings(), "weight", None)
    flops = 0.0
    for name, weight in network.named_parameters():
        share = 1.0
        if weight is head:
            share = predicted
        elif weight is table:
            share = 0.0
        elif ".experts." in name:
            share = active_count / expert_count
        size = getattr(weight, "ds_numel", weight.numel())  # DeepSpeed's ranks have a part of it
        flops += share * size * (6 if weight.requires_grad else 4)
    widths = sum(count * size for count, size in heads(settings))
    return flops + 12 * widths * length


def _peak(device: torch.device, precision: str) -> float:
    """Return the vendor's FLOPs a second, 0 if unknown. A 32-bit run is measured against the 16-bit peak, too."""
    gpu = None if device.type == "cpu" else hardware.find_gpu(torch.cuda.get_device_name(device))
    return 0.0 if gpu is None else (gpu.bf16 if precision == "bf16" else gpu.fp16) * 1e12


def _memory(device: torch.device) -> float:
    """Return the peak of this rank's memory: of the GPU's, or without one of the host's."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return float(torch.cuda.max_memory_allocated(device))


def perplexity(loss: float) -> float:
    """Return exp of the mean loss; exp(710) overflows a float, so 700 is the cap."""
    return math.exp(min(loss, 700.0))
