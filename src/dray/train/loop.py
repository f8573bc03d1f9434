"""The loop: steps of forward, backward and update. What a step does is decided by its number, the seed and the rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from dray.train import attention
from dray.train.checkpoint import Checkpoints, due
from dray.train.config import Config
from dray.train.data import Feed
from dray.train.metrics import Metrics, Speed
from dray.train.objective import Batch, Task
from dray.train.order import indices
from dray.train.parallel import Parallel
from dray.train.schedule import rate
from dray.train.stop import EXIT_FAILED, stop

if TYPE_CHECKING:
    from dray.train.analog import Analog

_NEVER = 1 << 62


class Loop:
    """One training run from any step to its last."""

    def __init__(
        self,
        config: Config,
        *,
        parallel: Parallel,
        feed: Feed,
        task: Task,
        metrics: Metrics,
        checkpoints: Checkpoints,
    ) -> None:
        self.config, self.parallel, self.feed, self.task = config, parallel, feed, task
        self.metrics, self.checkpoints = metrics, checkpoints
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._reader = ThreadPoolExecutor(1)
        self._sums = torch.zeros(
            2, dtype=torch.float64, device=parallel.device
        )  # losses and targets since the last line
        self._bad = torch.full((), _NEVER, device=parallel.device)  # the first step that was not finite
        self.speed = Speed(config, parallel)
        self._analog: Analog | None = None
        if config.analog:
            from dray.train.analog import Analog  # noqa: PLC0415  not every image has it

            self._analog = Analog(parallel, config.analog)

    def run(self, evaluate: Callable[[int], None]) -> None:
        """Take the steps that are left, with checkpoints and evaluations between them."""
        config, first = self.config, self.checkpoints.newest or 0
        self.parallel.network.train()
        if config.at_start and self.checkpoints.newest is None:
            self.checkpoints.save(0, self.feed.state())
        self.speed.begin(first)
        ahead = self._reader.submit(self._read, first)
        for step in range(first, config.steps):
            with self.speed.spent("data_s"):
                batches, place = ahead.result()
            if step + 1 < config.steps:
                ahead = self._reader.submit(self._read, step + 1)
            with self._analog.step() if self._analog else nullcontext():
                norm = self._step(step, batches)
            taken = step + 1
            if taken % config.log_every == 0 or taken in (first + 1, config.steps):
                self._log(taken, norm, batches[-1])
            if due(taken, config.every):
                self._check(taken)
                with self.speed.spent("checkpoint_s"):
                    self.checkpoints.save(taken, place)
            if config.eval_every and taken % config.eval_every == 0 and taken < config.steps:
                self._check(taken)
                with self.speed.spent("evaluation"):
                    evaluate(taken)
        self._reader.shutdown()
        self.checkpoints.settle()

    def _read(self, step: int) -> tuple[list[Batch], Any]:
        """This rank's batches of a step, and where the feed stands after it."""
        config, batches = self.config, []
        for micro in range(config.gradient_accumulation_steps):
            mine = indices(
                step,
                micro,
                self.rank,
                world=self.world,
                per_device=config.per_device,
                accumulation=config.gradient_accumulation_steps,
            )
            batches.append(self.task.batch(self.feed.rows(mine), mine))
        return batches, self.feed.state()

    def _step(self, step: int, batches: list[Batch]) -> torch.Tensor:
        # Dropout is a function of seed, step and rank: a run that is resumed draws the same numbers.
        torch.manual_seed(hash((self.config.seed, step, self.rank)) & (1 << 63) - 1)
        wanted = torch.tensor(sum(batch.wanted for batch in batches), dtype=torch.float64, device=self.parallel.device)
        self._sums[1] += wanted
        # The loss is the mean over all targets of the step, however they fell to ranks and passes.
        total = wanted * self.world
        if not self.task.even:
            dist.all_reduce(wanted)
            total = wanted
        share = (self.world / total.clamp(min=1)).float()
        for micro, batch in enumerate(batches):
            with self.parallel.turn(last=micro == len(batches) - 1):
                loss, _ = self.parallel.losses(batch.to(self.parallel.device))
                self.parallel.backward(loss * share)
            self._sums[0] += loss.detach()
        norm = self.parallel.update(rate(self.config, step))
        if self.parallel.scaler is None:
            self._bad = torch.where(norm.isfinite(), self._bad, self._bad.clamp(max=step + 1))
        return norm

    def _log(self, taken: int, norm: torch.Tensor, batch: Batch) -> None:
        config, scaler = self.config, self.parallel.scaler
        loss = self._check(taken)
        self._sums.zero_()
        fields = self.speed.measured(taken)
        if scaler:
            fields |= {"loss_scale": scaler.scale, "skipped_steps": scaler.skipped}
        if config.attention_stats:
            fields |= attention.scores(self.parallel, batch)
        self.metrics.write(
            "step",
            f"step {taken}/{config.steps}  loss {loss:.4f}  {fields['tokens_per_s']:,.0f} tokens/s  "
            f"{fields['seconds_left']:.0f} s left",
            step=taken,
            loss=loss,
            lr=rate(config, taken - 1),
            grad_norm=float(norm) if norm.isfinite() else None,  # of a step that fp16 left out
            tokens=taken * config.step_tokens,
            **fields,
        )

    def _check(self, taken: int) -> float:
        """The loss of all ranks since the last line.

        Stops if it or a gradient was not finite: before a line that would hide it, a checkpoint or an evaluation of it.
        """
        sums = self._sums.clone()
        dist.all_reduce(sums)
        total, targets = sums.tolist()
        step = int(self._bad)
        if not math.isfinite(total) or step != _NEVER:
            self._diverged(min(step, taken))
        return float(total / max(targets, 1.0))

    def _diverged(self, step: int) -> NoReturn:
        finite: list[Any] = [None] * self.world
        dist.all_gather_object(finite, bool(self._sums[0].isfinite()))
        ranks = [str(rank) for rank, good in enumerate(finite) if not good]
        self.checkpoints.settle()
        stop(
            f"the {'loss' if ranks else 'gradient'} is not finite any more",
            wanted="finite numbers",
            found=f"NaN or Inf at step {step}, on rank {', '.join(ranks) or 'unknown'}; " + self.checkpoints.said(),
            fix="a smaller train.lr or more train.warmup_steps; train.max_grad_norm = 1; bf16 in place of fp16; "
            "look at the data near that step",
            code=EXIT_FAILED,
        )
