"""The training loop: forward, backward, update. The step's number, the seed and the rank decide what a step does."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from dray.contract.findings import DrayError, RetryError
from dray.contract.heartbeat import CHECKPOINT, COMPILE, END, EVALUATE, LOAD, MODEL, STEP
from dray.train import ranks
from dray.train.checkpoint.checkpoints import Checkpoints, due
from dray.train.collectives import all_gather_json, barrier
from dray.train.config import Config
from dray.train.data.feeds import Feed
from dray.train.data.order import indices
from dray.train.loop.metrics import Jumps, Metrics, Speed
from dray.train.loop.profiler import Profiler
from dray.train.loop.schedule import learning_rate
from dray.train.model import attention_scores
from dray.train.objectives.base import Batch, Objective
from dray.train.parallel.base import Strategy
from dray.train.runtime import device_sync
from dray.train.runtime.compiled import Compiled
from dray.train.runtime.heartbeat import heartbeat
from dray.train.runtime.slow import Slow
from dray.train.runtime.stop import Stop

if TYPE_CHECKING:
    from dray.train.model.analog import Analog

_NEVER = 1 << 62
NOT_FINITE = "a smaller train.lr or more train.warmup_steps; train.max_grad_norm = 1; bf16 in place of fp16"


class Loop:
    """The steps of one run, from its newest checkpoint to its last step."""

    def __init__(
        self,
        config: Config,
        *,
        strategy: Strategy,
        feed: Feed,
        objective: Objective,
        metrics: Metrics,
        checkpoints: Checkpoints,
        compiled: Compiled,
        stop: Stop,
    ) -> None:
        self.config, self.strategy, self.feed, self.objective = config, strategy, feed, objective
        self.metrics, self.checkpoints, self.compiled, self.stop = metrics, checkpoints, compiled, stop
        self.rank, self.world = ranks.rank(), ranks.world()
        self.learning_rate = learning_rate(config)
        self.speed = Speed(config, strategy)
        self.slow = Slow(config, strategy.device, metrics)
        self.profiler = Profiler(config, strategy.device)
        self.jumps = Jumps()
        self._reader = ThreadPoolExecutor(1)  # reads the next step's batches during this step
        self._last_logged = 0  # the step of the last log line
        # These stay on the device. Each step updates them, and `_check` reads them for a log line.
        device = strategy.device
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses, and of labels, since the last line
        self._norm = torch.zeros((), device=device)  # of the last step's gradients, before clipping
        self._first_bad_norm = torch.full((), _NEVER, device=device)  # the first step whose norm is not finite
        self._first_bad_loss = self._first_bad_norm.clone()  # the same for the losses of this rank
        self._analog: Analog | None = None
        if config.analog:
            from dray.train.model.analog import Analog  # noqa: PLC0415  not every image has it

            self._analog = Analog(strategy, config.analog)

    def run(self, evaluate: Callable[[int], None]) -> None:
        """Take all steps after the newest checkpoint; log, save and evaluate between them."""
        config, checkpoints = self.config, self.checkpoints
        heartbeat.lap(MODEL)
        self.strategy.network.train()
        if config.checkpoint.at_start and checkpoints.newest is None:
            with heartbeat.during(CHECKPOINT):
                checkpoints.save(0, self.feed.state())
            heartbeat.lap(LOAD)
        begin = self._last_logged = checkpoints.newest or 0
        self.speed.begin(begin)
        heartbeat.enter(COMPILE)
        next_batches = self._reader.submit(self._read, begin)
        self.stop.begin(begin, config.steps)
        if self.stop.after(begin):
            self._end(begin)
        for step in range(begin, config.steps):
            taken = step + 1  # how many steps are taken after this one; logs and checkpoints count so
            with self.speed.spent("data_s"), self.slow.own_time():
                batches, label_count, position = next_batches.result()
            if taken < config.steps:
                next_batches = self._reader.submit(self._read, taken)
            self.profiler.before(taken)
            with self._analog.step() if self._analog else nullcontext():
                self._step(step, batches, label_count)
            self.profiler.after(taken)
            heartbeat.step(taken)

            ends = self.stop.after(taken)  # a signal has asked all ranks to end here
            if ends or taken % config.train.log_every == 0 or taken in (begin + 1, config.steps):
                self._log(taken, batches[-1])
                if taken == begin + 1:  # the line has all ranks' losses, so all ranks have compiled
                    heartbeat.first_step(self.compiled.nanoseconds)
                    self.compiled.keep()
                else:  # the GPU has taken all steps, since the line has their numbers
                    heartbeat.enter(STEP)
            if ends or due(taken, config.checkpoint.every):
                self._check(taken)
                with self.speed.spent("checkpoint_s"), heartbeat.during(CHECKPOINT):
                    checkpoints.save(taken, position)
            if ends:
                self._end(taken)
            if config.train.eval_every and taken % config.train.eval_every == 0 and taken < config.steps:
                self._check(taken)
                with self.speed.spent("evaluation"), heartbeat.during(EVALUATE):
                    evaluate(taken)
                    self.compiled.keep()
        heartbeat.enter(END)
        self._reader.shutdown()
        checkpoints.settle()

    def _read(self, step: int) -> tuple[list[Batch], int, Any]:
        """Return this rank's micro-batches of a step, how many labels they have, and the feed's position after it."""
        config, batches = self.config, []
        micros = config.gradient_accumulation_steps
        for micro in range(micros):
            samples = indices(
                step, micro, self.rank, world=self.world, per_device=config.per_device, accumulation=micros
            )
            batch = self.objective.batch(self.feed.rows(samples), samples)
            length = config.row_length(step)
            if length < config.data.sequence_length:  # the same tokens and labels, in shorter rows
                batch = Batch(batch.input_ids.view(-1, length), batch.labels.view(-1, length), None)
            batches.append(batch)
        return batches, sum(batch.label_count for batch in batches), self.feed.state()

    def _step(self, step: int, batches: list[Batch], label_count: int) -> None:
        """Take one step. Nothing here waits for the GPU: the host queues kernels ahead of it."""
        # Dropout depends on seed, step and rank alone, so a run that resumes draws the same numbers.
        torch.manual_seed(hash((self.config.train.seed, step, self.rank)) & (1 << 63) - 1)
        labels = torch.full((), label_count, dtype=torch.float64, device=self.strategy.device)
        self._sums[1] += labels
        # The loss is the mean over all labels of the step, whatever the number of ranks and micro-batches.
        if self.objective.even:
            total = labels * self.world
        else:
            dist.all_reduce(labels)
            total = labels
        scale = (self.world / total.clamp(min=1)).float()  # times the world size: the strategy averages over ranks
        for micro, batch in enumerate(batches):
            with self.strategy.accumulate(sync=micro == len(batches) - 1):
                with self.slow.forward():
                    loss, _ = self.strategy.losses(batch.to(self.strategy.device))
                self.strategy.backward(loss * scale)
            self._sums[0] += loss.detach()
        self._first_bad_loss = _first_bad(self._first_bad_loss, self._sums[0], step)
        self.checkpoints.fence()  # the update waits, on the GPU, until a checkpoint has its copy of the weights
        self._norm = self.strategy.update(self.learning_rate(step))
        if self.strategy.scaler is None:  # with fp16 the scaler skips a step whose norm is not finite
            self._first_bad_norm = _first_bad(self._first_bad_norm, self._norm, step)

    def _log(self, taken: int, batch: Batch) -> None:
        """Write a `step` line of metrics.jsonl: docs/reference/metrics.md explains each number."""
        config, first = self.config, self._last_logged + 1
        loss, norm, seconds = self._check(taken)
        self._last_logged = taken
        self._sums.zero_()
        line: dict[str, Any] = {
            "step": taken,
            "loss": loss,
            "lr": self.learning_rate(taken - 1),
            "grad_norm": norm if math.isfinite(norm) else None,  # null where fp16 skipped the step
            "tokens": taken * config.step_tokens,
            **self.speed.measured(taken),
        }
        if nodes := self.slow.nodes(seconds):
            line["node_s"] = nodes
        if scaler := self.strategy.scaler:
            line |= {"loss_scale": scaler.scale, "skipped_steps": scaler.skipped}
        if config.train.attention_stats:
            line |= attention_scores.scores(self.strategy, batch)
        text = f"step {taken}/{config.steps}  loss {loss:.4f}  {line['tokens_per_s']:,.0f} tokens/s  "
        self.metrics.write("step", f"{text}{line['seconds_left']:.0f} s left{self.checkpoints.warning()}", **line)
        self.slow.observe(seconds, taken)
        if (median := self.jumps.median_before(loss)) is not None:
            numbers = f"{loss:.4f}; {median:.4f} is the median of the lines before"
            self._warn("jump", first, taken, f"the loss jumped at {_steps_text(first, taken)}: {numbers}")

    def _check(self, taken: int) -> tuple[float, float, list[float]]:
        """Return the mean loss since the last line, the last step's norm, and each rank's own seconds.

        Call it before logging, saving or evaluating; it ends the run if a loss or a gradient is NaN or Inf.
        """
        sums = torch.cat([self._sums, self.slow.own_seconds()])
        dist.all_reduce(sums)
        scaler, rank_count = self.strategy.scaler, self.slow.ranks
        loss_sum, label_count, *others = device_sync.read(
            sums, self._first_bad_norm, self._norm, *([scaler.numbers] if scaler else [])
        )
        seconds, (bad_step, norm, *scaler_numbers) = others[:rank_count], others[rank_count:]
        if scaler:
            scaler.observe(*scaler_numbers)
        if bad_step != _NEVER:
            self._end_not_finite(int(bad_step), int(bad_step))
        elif not math.isfinite(loss_sum):
            self._end_not_finite(self._last_logged + 1, taken)
        return loss_sum / max(label_count, 1.0), norm, seconds

    def _end(self, taken: int) -> NoReturn:
        """End the run on all ranks: with 75 once the checkpoint is complete, with 69 if it could not be saved."""
        heartbeat.enter(CHECKPOINT)
        self.checkpoints.settle()
        barrier()
        self.checkpoints.require_saved()
        raise RetryError(
            f"the run was asked to end, after step {taken} of {self.config.steps}",
            found=self.checkpoints.newest_text(),
            fix="run the same command to go on from there",
        )

    def _end_not_finite(self, first: int, last: int) -> NoReturn:
        """End the run, and name the ranks whose loss was not finite; without such a rank it was the gradient."""
        with heartbeat.during(CHECKPOINT):
            self.checkpoints.settle()
        bad = all_gather_json(device_sync.read(self._first_bad_loss)[0] <= last)
        bad_ranks = [rank for rank in range(self.world) if bad[rank]]
        problem = f"the {'loss' if bad_ranks else 'gradient'} is not finite any more"
        where = f"NaN or Inf at {_steps_text(first, last)}, on rank {', '.join(map(str, bad_ranks)) or 'unknown'}"
        self._warn("not finite", first, last, f"{problem}: {where}")
        barrier()  # until rank 0 has written that line: the launcher ends it when another rank has failed
        raise DrayError(
            problem,
            wanted="finite numbers",
            found=f"{where}; {self.checkpoints.newest_text()}",
            fix=NOT_FINITE,
        )

    def _warn(self, kind: str, first: int, last: int, why: str) -> None:
        self.metrics.write("divergence", f"WARNING: {why}", kind=kind, first_step=first, last_step=last, why=why)


def _steps_text(first: int, last: int) -> str:
    """Return `step 7`, or `steps 7 to 9`."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _first_bad(first_bad: torch.Tensor, number: torch.Tensor, step: int) -> torch.Tensor:
    """Return the first step with a number that is not finite, this step included; without a sync."""
    return torch.where(number.isfinite(), first_bad, first_bad.clamp(max=step + 1))
