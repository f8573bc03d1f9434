"""Runs of a study as Slurm jobs: runs with the same sbatch command become tasks of one job array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dray.contract import run_folder
from dray.contract.findings import DrayError
from dray.planning.schema import Plan
from dray.runs import login, refusal, slurm, source, write
from dray.runs import submit as queue
from dray.runs.store import Queued, RunPaths, make_run_folder


class Common(NamedTuple):
    """What all runs of a study have in common."""

    recipe: Path
    settings: Sequence[str]
    site: str = ""
    options: Sequence[str] = ()
    """Options of sbatch."""
    known: login.Known | None = None


class Size(NamedTuple):
    """The size of one run; for 0 or None the recipe or the site decides."""

    nodes: int | None = None
    ranks: int = 0
    """Ranks per node."""
    gpus: int = 0
    """GPUs per node."""


class Job(NamedTuple):
    """A run that can be submitted."""

    number: int
    """The run's number in its study, from 1; in an array also the task's number."""
    run: Path
    plan: Plan
    argv: list[str]
    """The sbatch command for this run alone."""
    own: list[str]
    """The settings of this run alone: the last words of the command."""

    def alike(self) -> list[str]:
        """The command without the parts that belong to this run alone."""
        own = (f"--output={_log(self.run, '%j')}", f"--run={self.run}")
        return [word for word in self.argv[: len(self.argv) - len(self.own)] if word not in own]


def planned(common: Common, number: int, run: Path, own: Sequence[str], size: Size) -> Job:
    """Plan one run. Raises ConfigError if the plan is refused."""
    own = [*own, *([f"ranks_per_node={size.ranks}"] if size.ranks else [])]
    recipe = write.read_recipe(common.recipe, [*common.settings, *own])
    asked = queue.Asked(
        [str(common.recipe), *common.settings, *own], nodes=size.nodes, ranks=size.ranks, gpus=size.gpus,
        site=common.site, options=common.options,
    )  # fmt: skip
    return Job(number, run, *queue.planned(recipe, RunPaths(run), asked, common.known), own)


def groups(jobs: Sequence[Job], slurm: Mapping[str, str] = MappingProxyType({})) -> list[list[Job]]:
    """The jobs grouped by their common sbatch command, in order.

    Each job is alone if the cluster allows no array of this size: task numbers stay below MaxArraySize.
    """
    largest = slurm.get("MaxArraySize", "")
    apart = largest.isdecimal() and int(largest) <= len(jobs)
    found = dict[tuple[str, ...], list[Job]]()
    for job in jobs:
        found.setdefault((str(job.number),) if apart else tuple(job.alike()), []).append(job)
    return list(found.values())


def tasks(jobs: Sequence[Job]) -> str:
    """The task file for lib::task in slurm/lib.sh: one line per run, its name and settings separated by tabs.

    Control characters were refused before, so nothing needs quoting.
    """
    assert [job.number for job in jobs] == list(range(1, len(jobs) + 1))
    return "".join("\t".join([job.run.name, *job.own]) + "\n" for job in jobs)


def command(group: Sequence[Job], study: Path, at_most: int = 0) -> list[str]:
    """The sbatch command: of one run its own; of several, an array with at most `at_most` tasks at a time."""
    first, *others = group
    if not others:
        return first.argv
    limit = f"%{at_most}" if 0 < at_most < len(group) else ""
    changed = {
        f"--output={_log(first.run, '%j')}": [
            f"--output={_log(study, '%A_%a', '-%a')}", f"--array={_ranges([job.number for job in group])}{limit}"
        ],
        f"--run={first.run}": [f"--tasks={study / run_folder.TASKS}"],
    }  # fmt: skip
    alone = first.argv[: len(first.argv) - len(first.own)]
    return [word for given in alone for word in changed.get(given, [given])]


def submit(group: Sequence[Job], argv: Sequence[str], code: tuple[source.Source, str] | None) -> list[Queued]:
    """Make the run folders and submit the jobs; if sbatch refuses, remove the folders. Capsules record this `code`."""
    made: list[Path] = []
    try:
        for job in group:
            make_run_folder(job.run, share=job.plan.recipe.runs.share)
            made.append(job.run)
        array = slurm.sbatch(argv)
    except (DrayError, OSError) as refused:
        for run in made:
            run.rmdir()
        if isinstance(refused, DrayError):
            raise refusal.explained(refused, argv) from None
        raise
    found = [array.model_copy(update={"task": job.number}) for job in group] if len(group) > 1 else [array]
    for job, queued in zip(group, found, strict=True):
        queue.record(job.run, queued, code)
    return found


def _log(run: Path, job: str, task: str = "") -> str:
    """The job's log, named as in submit.sbatch."""
    return f"{run}".replace("%", "%%") + f"{task}/job-{job}.log"


def _ranges(numbers: Sequence[int]) -> str:
    """1-3,5 as Slurm reads it."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else f"{one[0]}" for one in found)
