"""The grace: how long before its end Slurm signals a job to save."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.facts import Facts
from dray.planning.schema import Choice

DEFAULT_S = 120
"""What the batch scripts ask for: #SBATCH --signal=B:USR1@120."""
_SIGNAL = re.compile(r"--signal=(?:[RB]{1,2}:)?[A-Za-z0-9]+(?:@([0-9]{1,5}))?")
_SLURM_S = 60  # of a --signal without a time


def _signal(options: Sequence[str]) -> re.Match[str] | None:
    matches = [match for option in options if (match := _SIGNAL.fullmatch(option))]
    return matches[-1] if matches else None


def chosen(recipe: Recipe, site: Site, facts: Facts) -> Choice[int]:
    """Seconds before the time limit, and who set them; a job cannot see its own --signal."""
    typed, signal = _signal(facts.options), _signal(site.sbatch)
    if typed:
        return Choice(int(typed[1] or _SLURM_S), f"{typed[0]} of the command line")
    if recipe.grace_s:
        return Choice(recipe.grace_s, "the recipe's grace_s")
    if site.grace_s:
        return Choice(site.grace_s, f"grace_s of site {site.name}")
    if signal:
        return Choice(int(signal[1] or _SLURM_S), f"{signal[0]} of site {site.name}")
    return Choice(DEFAULT_S, "the default --signal of the batch scripts")


def wanted(save_s: float) -> int:
    """The shortest grace that is safe: a step ends first, and a busy disk may be slower than it ever was."""
    return max(1, math.ceil(2 * save_s))
