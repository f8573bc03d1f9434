"""The plan as data. The runner, the checks and the trainer read it as plan.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from dray.config.preflight import Preflight
from dray.config.recipe import Recipe
from dray.config.site import Fabric
from dray.config.training import Batch
from dray.contract import findings
from dray.facts import Engine, Layer
from dray.planning import staging
from dray.planning.binds import Bind
from dray.planning.environment import Variable
from dray.planning.world import SLURM, World


def _as_object(finding: findings.Finding) -> dict[str, Any]:
    return {name: value for name, value in finding._asdict().items() if value not in ("", None)}


Finding = Annotated[
    findings.Finding,
    BeforeValidator(lambda found: findings.Finding(**found) if isinstance(found, dict) else found),
    PlainSerializer(_as_object),
]


class Plan(BaseModel):
    """One attempt at a run, ready to be rendered and started."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    dray: str
    run: str
    run_folder: str
    attempt: int
    job: int = 0
    """Slurm's number; 0 without Slurm."""
    folder: str
    """Of this attempt; the checkpoints of all of them are in the run's."""
    scratch: str
    """A node's own folder for temporary files and compiled code; gone when the node has ended. Nobody can guess its
    name, and it is this user's alone."""
    engine: Engine
    image: str
    image_sha256: str
    layer: Layer | None = None
    """The user's own packages, bound beside the image."""
    signers: tuple[str, ...]
    """Fingerprints of keys, one of which must have signed the image and the layer, where recipe or site demand it."""
    stage: str
    stage_by: tuple[staging.Way, ...] = ()
    """How the image comes to the folder `stage` of each node; what did not come, the node copies."""
    variant: str
    site: str
    sbatch: tuple[str, ...]
    grace_s: int
    """Seconds before the time limit at which Slurm is asked to tell the job."""
    fabric: Fabric
    annotations: dict[str, str]
    """What the engine's own hooks are told, by the name of the annotation."""
    preflight: Preflight | None
    user: str
    world: World
    batch: Batch | None
    launcher: tuple[str, ...]
    command: tuple[str, ...]
    where: str
    files: dict[str, str]
    env: tuple[Variable, ...]
    pass_env: tuple[str, ...]
    left_outside: tuple[str, ...]
    binds: tuple[Bind, ...]
    reasons: dict[str, str]
    findings: tuple[Finding, ...] = ()
    recipe: Recipe

    @property
    def by_slurm(self) -> bool:
        """Whether Slurm starts the nodes."""
        return self.world.identity == SLURM

    def refuse(self) -> None:
        """Raise the first finding for which the run must not start."""
        for finding in self.findings:
            if finding.code:
                raise findings.error(finding)
