"""metrics.jsonl: one JSON object a line, written by rank 0 as it happens. docs/metrics.md is its schema."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dray.train.config import Config
from dray.train.stop import EXIT_FAILED, stop


class Metrics:
    """The file, and a plain line for who watches rank 0's log."""

    def __init__(self, path: str, *, writes: bool) -> None:
        self._file = open(path, "a", encoding="utf-8") if writes else None  # noqa: SIM115, PTH123  open for the whole run

    def write(self, event: str, shown: str, **fields: Any) -> None:  # noqa: ANN401  any JSON value
        """One line, flushed: a reader follows it live. Every rank shows it in its own log."""
        print(shown, flush=True)
        if self._file is not None:
            self._file.write(
                json.dumps({"event": event, "time": round(time.time(), 3), **fields}, allow_nan=False) + "\n"
            )
            self._file.flush()


class Report(TrainerCallback):
    """Trainer's log lines as metrics."""

    def __init__(self, metrics: Metrics, config: Config) -> None:
        self._metrics = metrics
        self._tokens_a_step = config.global_size * config.block
        self._began = self._last_time = 0.0
        self._last_step = 0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,  # noqa: ANN401
    ) -> None:
        """The clock starts when the first step may."""
        self._began = self._last_time = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,  # noqa: ANN401
    ) -> None:
        """Only training steps; evaluation has its own event."""
        if not logs or "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            stop(
                f"the loss at step {state.global_step} is {logs['loss']}",
                wanted="a finite loss",
                found=f"{logs['loss']}, with lr {logs.get('learning_rate')} and grad_norm {logs.get('grad_norm')}",
                fix="a smaller train.lr or more train.warmup_steps; check the data",
                code=EXIT_FAILED,
            )
        now = time.monotonic()
        speed = (state.global_step - self._last_step) * self._tokens_a_step / (now - self._last_time)
        left = (now - self._began) / state.global_step * (state.max_steps - state.global_step)
        self._last_step, self._last_time = state.global_step, now
        self._metrics.write(
            "step",
            f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}"
            f"  {speed:,.0f} tokens/s  {left:.0f} s left",
            step=state.global_step,
            loss=logs["loss"],
            lr=logs.get("learning_rate"),
            grad_norm=logs.get("grad_norm"),
            tokens=state.global_step * self._tokens_a_step,
            tokens_per_s=round(speed, 1),
            seconds_left=round(left, 1),
        )

    def average_speed(self, steps: int) -> tuple[float, float]:
        """Tokens a second over the whole training, and its seconds."""
        seconds = time.monotonic() - self._began
        return round(steps * self._tokens_a_step / seconds, 1), round(seconds, 2)


def perplexity(loss: float) -> float:
    """exp of the mean loss a token; past 700 a float has no room, and nobody cares."""
    return math.exp(min(loss, 700.0))
