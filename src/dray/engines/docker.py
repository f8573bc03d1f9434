"""Docker and Podman: one container a node, on a private network where all nodes are on one machine."""

from __future__ import annotations

from collections.abc import Sequence

from dray.config.image import ACCELERATORS
from dray.engines.places import MOUNTS
from dray.engines.words import OnNode, each
from dray.planning.plan import Plan

LABEL = "dray.run"
DEVICES = "devices"
_ROCM = ["--device=/dev/kfd", "--device=/dev/dri"]
_GPU = {
    "docker": {"cpu": [], "cuda": ["--gpus=all"], "rocm": _ROCM},
    "podman": {"cpu": [], "cuda": ["--device=nvidia.com/gpu=all"], "rocm": _ROCM},
}


def network(plan: Plan) -> str:
    """The private network's name."""
    return f"dray-{plan.run}"


def argv(plan: Plan, inner: Sequence[str]) -> list[str]:
    """`run` in the foreground; the container ends with its command and leaves nothing."""
    name = plan.world.identity["name"]
    # A hostname alone is not in the network's DNS.
    private = [f"--network={network(plan)}", OnNode(f'--hostname="${name}"'), OnNode(f'--network-alias="${name}"')]
    # Podman without root: the caller's number inside is another one outside, unless it is told to keep it.
    keep = ["--userns=keep-id"] if plan.engine == "podman" and not plan.user.startswith("0:") else []
    return [
        plan.engine,
        "run",
        "--rm",
        "--init",
        f"--label={LABEL}={plan.run}",
        *(private if plan.world.one_machine else ["--network=host"]),
        f"--user={plan.user}",
        *keep,
        "--shm-size=1g",  # the default of 64 MB ends data workers and NCCL with a bus error
        each(DEVICES),  # Apptainer sees the host's; here each must be named
        *_GPU[plan.engine][ACCELERATORS[plan.variant]],
        *(f"--env={name}" for name in (*(v.name for v in plan.env), *plan.world.identity.values(), *plan.pass_env)),
        each(MOUNTS),
        f"--workdir={plan.where}",
        plan.image,
        *inner,
    ]


def identify(plan: Plan) -> list[str]:
    """The program that prints which image this node has."""
    return [plan.engine, "image", "inspect", "--format={{.Id}}", plan.image]
