"""Docker: one container a node on a private network, for the smoke test on one machine."""

from __future__ import annotations

from collections.abc import Sequence

from dray.binds import Bind
from dray.engines.words import OnNode, Word, csv_line
from dray.plan import Plan
from dray.spec.image import ACCELERATORS

LABEL = "dray.run"
_GPU = {"cpu": [], "cuda": ["--gpus=all"], "rocm": ["--device=/dev/kfd", "--device=/dev/dri"]}


def network(plan: Plan) -> str:
    """The private network's name."""
    return f"dray-{plan.run}"


def argv(plan: Plan, inner: Sequence[str]) -> list[Word]:
    """`run` in the foreground; the container ends with its command and leaves nothing."""
    name_variable = plan.world.identity["name"]
    return [
        "docker",
        "run",
        "--rm",
        "--init",
        f"--label={LABEL}={plan.run}",
        f"--network={network(plan)}",
        OnNode("--hostname", name_variable),
        OnNode("--network-alias", name_variable),  # a hostname alone is not in the network's DNS
        f"--user={plan.user}",
        "--shm-size=1g",  # the default of 64 MB ends data workers and NCCL with a bus error
        *_GPU[ACCELERATORS[plan.variant]],
        *(f"--env={name}" for name in (*(v.name for v in plan.env), *plan.world.identity.values())),
        *(f"--mount={_mount(bind)}" for bind in plan.binds),
        f"--workdir={plan.folder}",
        plan.image,
        *inner,
    ]


def _mount(bind: Bind) -> str:
    fields = ["type=bind", f"src={bind.path}", f"dst={bind.path}"]
    return csv_line(fields if bind.write else [*fields, "readonly"])
