"""The grace: how long before its end Slurm signals a job to save, and whether a checkpoint fits into that."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract.findings import Finding
from dray.facts import Facts, Files
from dray.planning.choice import Choice
from dray.planning.rule import Planned

DEFAULT_S = 120
"""What the batch scripts ask for: #SBATCH --signal=B:USR1@120."""
_SIGNAL = re.compile(r"--signal=(?:[RB]{1,2}:)?[A-Za-z0-9]+(?:@([0-9]{1,5}))?")
_SLURM_S = 60  # of a --signal without a time
_TIME = re.compile(r"(?:--time=|-t)(?:([0-9]{1,5})-)?([0-9]{1,6})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
_ENDING = ("CANCEL", "REQUEUE")  # modes of preemption after which a job runs no longer


def chosen(recipe: Recipe, site: Site, facts: Facts) -> Choice[int]:
    """Seconds before the time limit, and who set them; a job cannot see its own --signal."""
    signals = [match for option in (*site.sbatch, *facts.options) if (match := _SIGNAL.fullmatch(option))]
    typed = [match for option in facts.options if (match := _SIGNAL.fullmatch(option))]
    if typed:
        return Choice(int(typed[-1][1] or _SLURM_S), f"{typed[-1][0]} of the command line")
    if recipe.grace_s:
        return Choice(recipe.grace_s, "the recipe's grace_s")
    if site.grace_s:
        return Choice(site.grace_s, f"grace_s of site {site.name}")
    if signals:
        return Choice(int(signals[-1][1] or _SLURM_S), f"{signals[-1][0]} of site {site.name}")
    return Choice(DEFAULT_S, "the default --signal of the batch scripts")


def wanted(save_s: float) -> int:
    """The shortest grace that is safe: a step ends first, and a busy disk may be slower than it ever was."""
    return max(1, math.ceil(2 * save_s))


def advice(given: Planned) -> Iterator[Finding]:
    """Warn of a grace that is too short for the slowest checkpoint of an earlier run."""
    facts, files = given.facts, given.files
    if facts.scheduler != "slurm" or given.recipe.train is None:
        return
    grace, save = chosen(given.recipe, given.site, facts), files.save_s
    if save is not None and grace.value < wanted(save):
        yield Finding(
            "the grace is shorter than twice the slowest checkpoint",
            wanted=f"{wanted(save)} s or more: a checkpoint of run {files.save_run} took {save:.1f} s",
            found=f"{grace.value} s before the time limit ({grace.why})",
            fix=f"grace_s={wanted(save)} with dray submit; with sbatch itself --signal=B:USR1@{wanted(save)}",
        )
    limit = _limit(facts)
    if limit and grace.value >= limit:
        yield Finding(
            "the grace is as long as the job, so that Slurm would end the run at its start",
            wanted=f"less than {limit} s, the time limit",
            found=f"{grace.value} s ({grace.why})",
            fix="set a longer --time, or a shorter grace_s",
        )
    yield from _preemption(facts, files)


def _preemption(facts: Facts, files: Files) -> Iterator[Finding]:
    """Warn of preemption that leaves no time to save, by what Slurm says of this partition."""
    save, kill = files.save_s, facts.kill_wait_s
    if facts.preempt_mode and any(mode in facts.preempt_mode for mode in _ENDING):
        seconds = (facts.preempt_grace_s or 0) + (kill or 0)
        seen = f"PreemptMode={facts.preempt_mode}, GraceTime {facts.preempt_grace_s or 0} s, KillWait {kill or 0} s"
        if save is not None and save > seconds:
            yield Finding(
                "a checkpoint takes longer than preemption allows",
                wanted=f"{save:.1f} s, which a checkpoint of run {files.save_run} took",
                found=seen,
                fix="save often (checkpoint.every), or use a partition without preemption",
            )
        if not facts.preempt_signal and not files.earlier:
            yield Finding(
                "on this partition preemption does not send the signal that asks a run to save",
                wanted="PreemptParameters=send_user_signal, and a GraceTime, in slurm.conf",
                found=f"{seen}, no send_user_signal: SIGTERM goes to all processes at once",
                fix="save often (checkpoint.every), and ask the administrators for it",
                kind="note",
            )
    if save is not None and kill is not None and save > kill:
        yield Finding(
            "scancel allows less time than a checkpoint takes",
            found=f"KillWait {kill} s, and a checkpoint of run {files.save_run} took {save:.1f} s",
            fix="to end such a run with a checkpoint: scancel --batch --signal=USR1 JOB",
            kind="note",
        )


def _limit(facts: Facts) -> int | None:
    """The time limit of the options, in seconds, where they have one: MIN, MIN:SEC, H:MIN:SEC, D-H, D-H:MIN[:SEC]."""
    limits = [match for option in facts.options if (match := _TIME.fullmatch(option))]
    if not limits:
        return None
    days, *rest = limits[-1].groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is None:
        hours, minutes, seconds = numbers if len(numbers) == 3 else [0, *numbers, 0][:3]
    else:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
