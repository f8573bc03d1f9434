"""Apptainer and SingularityCE: the same options, another name."""

from __future__ import annotations

from collections.abc import Sequence

from dray.config.image import ACCELERATORS
from dray.engines import stage
from dray.engines.places import MOUNTS
from dray.engines.words import OnNode, each
from dray.planning.plan import Plan

_GPU = {"cpu": [], "cuda": ["--nv"], "rocm": ["--rocm"]}


def argv(plan: Plan, inner: Sequence[str]) -> list[str]:
    """`exec` with nothing of the host inside but what the plan names, /tmp, and what the site's administrators bind."""
    return [
        plan.engine,
        "--quiet",  # its INFO lines about optional helpers are nothing that a user can act on
        "exec",
        "--cleanenv",
        "--no-eval",  # else a $(...) in a variable's value is run
        "--no-mount=home,cwd",
        *_GPU[ACCELERATORS[plan.variant]],
        each(MOUNTS),
        f"--pwd={plan.where}",
        OnNode(f'"${stage.IMAGE}"') if plan.stage else plan.image,
        *inner,
    ]


def identify(plan: Plan) -> list[str]:
    """The id in the SIF's header, which dray makes of the image's content: reading it all would take seconds."""
    return ["od", "--address-radix=n", "--format=x1", "--skip-bytes=48", "--read-bytes=16", plan.image]
