"""The salloc allocation around this shell: `dray run` uses its nodes without waiting in the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dray.config import dray_home
from dray.contract.findings import ConfigError

# Where salloc starts the shell on the first node (LaunchParameters=use_interactive_step), in a step with this number.
_INTERACTIVE = "4294967290"
_WHOLE = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")


class Allocation(NamedTuple):
    """What Slurm tells a shell in an allocation."""

    job: str
    nodelist: str
    nodes: str

    def __str__(self) -> str:
        return f"job {self.job} on {self.nodelist}"


def found(env: Mapping[str, str]) -> Allocation | None:
    """The allocation of this shell; None inside batch scripts and srun steps."""
    step = env.get("SLURM_STEP_ID", _INTERACTIVE)
    if env.get("ENVIRONMENT") == "BATCH" or step != _INTERACTIVE or not all(env.get(name) for name in _WHOLE):
        return None
    return Allocation(*(env[name] for name in _WHOLE))


def require_nodes(allocation: Allocation, nodes: int | None) -> None:
    """Refuse a --nodes other than all nodes of the allocation."""
    if nodes is not None and str(nodes) != allocation.nodes:
        raise ConfigError(
            "a run in an allocation uses all of its nodes",
            wanted=f"--nodes {allocation.nodes}, or no --nodes",
            found=f"--nodes {nodes}",
            fix="leave out --nodes; or use salloc --nodes=N for another size, or --local for this machine only",
        )


def argv(allocation: Allocation, *, run: str, site: str, recipe: Sequence[str], command: Sequence[str]) -> list[str]:
    """The bash command that starts the batch script inside the allocation."""
    script = dray_home.root() / "slurm" / ("singlenode.sh" if allocation.nodes == "1" else "multinode.sh")
    options = [*([f"--run={run}"] if run else []), *([f"--site={site}"] if site else [])]
    return ["bash", str(script), *options, *recipe, *(["--", *command] if command else [])]


def environment(env: Mapping[str, str], runs: Path) -> dict[str, str]:
    """The environment for the batch script: the command runs in the current folder, not in salloc's."""
    here = {"DRAY_HOME": str(dray_home.root()), "DRAY_RUNS": str(runs), "SLURM_SUBMIT_DIR": str(Path.cwd())}
    return {**env, **here}
