"""An allocation by salloc that this shell is in: `dray run` takes its nodes, again and again, without a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dray.config import checkout
from dray.contract.findings import ConfigError

# Where salloc starts the shell on the first node (LaunchParameters=use_interactive_step), in a step with this number.
_INTERACTIVE = "4294967290"
_WHOLE = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")


class Allocation(NamedTuple):
    """What Slurm tells a shell in it."""

    job: str
    nodelist: str
    nodes: str

    def __str__(self) -> str:
        return f"job {self.job} on {self.nodelist}"


def found(env: Mapping[str, str]) -> Allocation | None:
    """None in a batch script, whose run is its own, and in a step by srun, of which each task would start a run."""
    step = env.get("SLURM_STEP_ID", _INTERACTIVE)
    if env.get("ENVIRONMENT") == "BATCH" or step != _INTERACTIVE or not all(env.get(name) for name in _WHOLE):
        return None
    return Allocation(*(env[name] for name in _WHOLE))


def require_nodes(allocation: Allocation, nodes: int | None) -> None:
    """A run in it takes all of its nodes."""
    if nodes is not None and str(nodes) != allocation.nodes:
        raise ConfigError(
            "a run in an allocation takes all of its nodes",
            wanted=f"--nodes {allocation.nodes}, or none",
            found=f"--nodes {nodes}",
            fix="leave out --nodes; salloc --nodes=N for another allocation; --local for this machine alone",
        )


def argv(allocation: Allocation, *, run: str, site: str, recipe: Sequence[str], command: Sequence[str]) -> list[str]:
    """What bash runs there: the batch script itself, which an salloc takes as a job does."""
    script = checkout.root() / "slurm" / ("singlenode.sh" if allocation.nodes == "1" else "multinode.sh")
    options = [*([f"--run={run}"] if run else []), *([f"--site={site}"] if site else [])]
    return ["bash", str(script), *options, *recipe, *(["--", *command] if command else [])]


def environment(env: Mapping[str, str], runs: Path) -> dict[str, str]:
    """A command runs where we stand, which need not be where salloc was typed."""
    here = {"DRAY_HOME": str(checkout.root()), "DRAY_RUNS": str(runs), "SLURM_SUBMIT_DIR": str(Path.cwd())}
    return {**env, **here}
