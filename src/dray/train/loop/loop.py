"""The training loop: forward, backward, update. Step number, seed and rank decide what a step does."""

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
from dray.train.errors import say
from dray.train.loop import divergence
from dray.train.loop.metrics import Metrics, Speed
from dray.train.loop.profiler import Profiler
from dray.train.loop.schedule import learning_rate
from dray.train.model import attention_scores
from dray.train.objectives.base import Batch, Objective
from dray.train.parallel.base import Strategy
from dray.train.runtime import host
from dray.train.runtime.compiled import Compiled
from dray.train.runtime.heartbeat import heartbeat
from dray.train.runtime.slow import Slow
from dray.train.runtime.stop import Stop

if TYPE_CHECKING:
    from dray.train.model.analog import Analog

_NEVER = 1 << 62
NOT_FINITE = "a smaller train.lr or more train.warmup_steps; train.max_grad_norm = 1; bf16 in place of fp16"


class _BackError(Exception):
    """The run has gone back to its newest checkpoint."""


class Loop:
    """One training run from any step to its last."""

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
        self._reader = ThreadPoolExecutor(1)
        self._sums = torch.zeros(
            2, dtype=torch.float64, device=strategy.device
        )  # losses and labels since the last line
        self._bad = torch.full((), _NEVER, device=strategy.device)  # the first step that was not finite
        self._own_bad = self._bad.clone()  # on this rank, by its own losses
        self.speed = Speed(config, strategy)
        self.slow = Slow(config, strategy.device, metrics)
        self.profiler = Profiler(config, strategy.device)
        self._logged = self._lines = 0  # the step of the last line, and how many there are
        self._analog: Analog | None = None
        if config.analog:
            from dray.train.model.analog import Analog  # noqa: PLC0415  not every image has it

            self._analog = Analog(strategy, config.analog)

    def run(self, evaluate: Callable[[int], None]) -> None:
        """Take the steps that are left, with checkpoints and evaluations between them."""
        heartbeat.lap(MODEL)
        self.strategy.network.train()
        if self.config.checkpoint.at_start and self.checkpoints.newest is None:
            with heartbeat.during(CHECKPOINT):
                self.checkpoints.save(0, self.feed.state())
            heartbeat.lap(LOAD)
        while True:
            try:
                self._steps(self.checkpoints.newest or 0, evaluate)
                break
            except _BackError:
                continue
        heartbeat.enter(END)
        self._reader.shutdown()
        self.profiler.close()
        self.checkpoints.settle()

    def _steps(self, begin: int, evaluate: Callable[[int], None]) -> None:
        config, norm = self.config, torch.zeros((), device=self.strategy.device)
        self.speed.begin(begin)
        self.profiler.begin(begin)
        self._logged, self._lines = begin, 0
        heartbeat.enter(COMPILE)
        ahead = self._reader.submit(self._read, begin)
        self.stop.begin(begin, config.steps)
        if self.stop.after(begin):
            self._end(begin)
        for step in range(begin, config.steps):
            taken = step + 1
            self.profiler.before(taken)
            with self.speed.spent("data_s"), self.slow.waiting():
                batches, labels, position = ahead.result()
            if taken < config.steps:
                ahead = self._reader.submit(self._read, taken)
            if self.checkpoints.watch.leaves_out(taken):
                say(f"step {taken} is skipped")
            else:
                with self._analog.step() if self._analog else nullcontext():
                    norm = self._step(step, batches, labels)
            self.profiler.after(taken)
            heartbeat.step(taken)
            if taken % config.train.log_every == 0 or taken in (begin + 1, config.steps):
                self._log(taken, norm, batches[-1])
            if taken == begin + 1:  # all ranks have compiled: their losses are logged
                heartbeat.first_step(self.compiled.nanoseconds)
                self.compiled.keep()
            if due(taken, config.checkpoint.every):
                self._check(taken, norm)
                with self.speed.spent("checkpoint_s"), heartbeat.during(CHECKPOINT):
                    self.checkpoints.save(taken, position)
            if config.train.eval_every and taken % config.train.eval_every == 0 and taken < config.steps:
                self._check(taken, norm)
                with self.speed.spent("evaluation"), heartbeat.during(EVALUATE):
                    evaluate(taken)
                    self.compiled.keep()
            if self.stop.after(taken):
                if self._logged < taken:
                    self._log(taken, norm, batches[-1])
                heartbeat.enter(CHECKPOINT)
                if not due(taken, config.checkpoint.every):
                    self.checkpoints.save(taken, position)
                self._end(taken)

    def _read(self, step: int) -> tuple[list[Batch], int, Any]:
        """This rank's micro-batches of a step, how many labels they have, and the feed's position after it."""
        config, batches = self.config, []
        for micro in range(config.gradient_accumulation_steps):
            samples = indices(
                step,
                micro,
                self.rank,
                world=self.world,
                per_device=config.per_device,
                accumulation=config.gradient_accumulation_steps,
            )
            batches.append(self.objective.batch(self.feed.rows(samples), samples))
        return batches, sum(batch.label_count for batch in batches), self.feed.state()

    def _step(self, step: int, batches: list[Batch], count: int) -> torch.Tensor:
        """On a GPU no line of it waits: the host is ahead, and tells the GPU what to do next."""
        # Dropout is a function of seed, step and rank: a run that is resumed draws the same numbers.
        torch.manual_seed(hash((self.config.train.seed, step, self.rank)) & (1 << 63) - 1)
        labels = torch.full((), count, dtype=torch.float64, device=self.strategy.device)
        self._sums[1] += labels
        # The loss is the mean over all labels of the step, however they fell to ranks and micro-batches.
        total = labels * self.world
        if not self.objective.even:
            dist.all_reduce(labels)
            total = labels
        share = (self.world / total.clamp(min=1)).float()
        for micro, batch in enumerate(batches):
            with self.strategy.accumulate(sync=micro == len(batches) - 1):
                with self.slow.forward():
                    loss, _ = self.strategy.losses(batch.to(self.strategy.device))
                self.strategy.backward(loss * share)
            self._sums[0] += loss.detach()
        own = self._sums[0].isfinite()
        self._own_bad = torch.where(own, self._own_bad, self._own_bad.clamp(max=step + 1))
        self.checkpoints.fence()
        norm = self.strategy.update(learning_rate(self.config, step))
        if self.strategy.scaler is None:
            self._bad = torch.where(norm.isfinite(), self._bad, self._bad.clamp(max=step + 1))
        return norm

    def _log(self, taken: int, norm: torch.Tensor, batch: Batch) -> None:
        config, scaler, first = self.config, self.strategy.scaler, self._logged + 1
        if all(map(self.checkpoints.watch.leaves_out, range(first, taken + 1))):
            return
        # Before the host waits for the device, which computes meanwhile.
        shares = self.feed.shares(range(self._logged * config.global_size, taken * config.global_size))
        loss, last, own = self._check(taken, norm)
        self._logged = taken
        self._lines += 1
        if self._lines == 2:  # only now a line has waited for all steps that a GPU had still to take
            heartbeat.enter(STEP)
        self._sums.zero_()
        fields = self.speed.measured(taken)
        if shares:
            fields["shares"] = shares
        if nodes := self.slow.nodes(own):
            fields["node_s"] = nodes
        if scaler:
            fields |= {"loss_scale": scaler.scale, "skipped_steps": scaler.skipped}
        if config.train.attention_stats:
            fields |= attention_scores.scores(self.strategy, batch)
        self.metrics.write(
            "step",
            f"step {taken}/{config.steps}  loss {loss:.4f}  {fields['tokens_per_s']:,.0f} tokens/s  "
            f"{fields['seconds_left']:.0f} s left{self.checkpoints.warning()}",
            step=taken,
            loss=loss,
            lr=learning_rate(config, taken - 1),
            grad_norm=last if math.isfinite(last) else None,  # of a step that fp16 left out
            tokens=taken * config.step_tokens,
            **fields,
        )
        self.slow.see(own, taken)
        if (middle := self.checkpoints.watch.jumped(loss)) is not None:
            self._jumped(range(first, taken + 1), loss, middle)

    def _check(self, taken: int, norm: torch.Tensor) -> tuple[float, float, list[float]]:
        """The loss of all ranks since the last line, the norm, and each rank's own time.

        Call it before logging, saving or evaluating; it ends the run on NaN or Inf in a loss or gradient.
        """
        sums = torch.cat([self._sums, self.slow.told()])
        dist.all_reduce(sums)
        scaler, ranks = self.strategy.scaler, self.slow.ranks
        total, labels, *more = host.read(sums, self._bad, norm, *([scaler.numbers] if scaler else []))
        own, (step, last, *scaled) = more[:ranks], more[ranks:]
        if scaler:
            scaler.observe(*scaled)
        if not math.isfinite(total) or step != _NEVER:
            self._not_finite(int(step) if step != _NEVER else self._logged + 1, min(int(step), taken))
        return total / max(labels, 1.0), last, own

    def _end(self, taken: int) -> NoReturn:
        """All ranks together, once what was begun is there; where it is not, the disk is the cause."""
        self.profiler.close()
        self.checkpoints.settle()
        barrier()
        self.checkpoints.require_saved()
        raise RetryError(
            f"the run was asked to end, after step {taken} of {self.config.steps}",
            found=self.checkpoints.newest_text(),
            fix="run the same command to go on from there",
        )

    def _jumped(self, steps: range, loss: float, middle: float) -> None:
        """A loss far above those before it."""
        named = divergence.steps_text(steps[0], steps[-1])
        why = f"the loss jumped at {named}: {loss:.4f}; {middle:.4f} is the median of the lines before"
        self._diverged(steps, why, [*range(self.world)], kind="jump")

    def _not_finite(self, first: int, last: int) -> NoReturn:
        """A loss or a gradient is not a number any more."""
        with heartbeat.during(CHECKPOINT):
            self.checkpoints.settle()
        own = all_gather_json(host.read(self._own_bad)[0] <= last)
        ranks = [rank for rank, bad in enumerate(own) if bad]
        named = ", ".join(map(str, ranks)) or "unknown"
        found = f"NaN or Inf at {divergence.steps_text(first, last)}, on rank {named}"
        problem = f"the {'loss' if ranks else 'gradient'} is not finite any more"
        ranks = ranks or [*range(self.world)]
        data = self._diverged(range(first, last + 1), f"{problem}: {found}", ranks, kind="not finite")
        barrier()  # the launcher ends rank 0 when another rank has failed, and it writes the metrics
        raise DrayError(
            problem,
            wanted="finite numbers",
            found=f"{found}; {self.checkpoints.newest_text()}\n{data}",
            fix=f"{NOT_FINITE}; look at the data of that step",
        )

    def _diverged(self, steps: range, why: str, ranks: list[int], *, kind: str) -> str:
        """Name the samples, in the metrics too. Where the recipe says so, go back; it does not return then."""
        config, checkpoints = self.config, self.checkpoints
        data = divergence.samples(self.feed, config, range(steps[0] - 1, steps[-1]), ranks, self.world)
        text = divergence.text(data)
        back = None
        if config.train.on_divergence == "skip" and len(checkpoints.watch.skipped) < divergence.MOST:
            with heartbeat.during(CHECKPOINT):
                checkpoints.settle()
            back = checkpoints.newest if (checkpoints.newest or 0) < steps[0] else None
        named = divergence.steps_text(steps[0], steps[-1])
        then = f"the run goes back to step {back} and skips {named}" if back is not None else ""
        why = "; ".join(filter(None, (why, text, then)))
        self.metrics.write(
            "divergence", f"WARNING: {why}", kind=kind, first_step=steps[0], last_step=steps[-1], ranks=ranks,
            samples=data, back_to=back, why=why,
        )  # fmt: skip
        if back is not None:
            self._reader.submit(int).result()  # what was being read is read
            with heartbeat.during(CHECKPOINT):
                self.feed.load(checkpoints.again(without=[steps[0], steps[-1]]))
            self._sums.zero_()
            self._bad.fill_(_NEVER)
            self._own_bad.fill_(_NEVER)
            raise _BackError
        return text
