"""Pyxis: Slurm itself starts the container, by options of srun; node.sh is then inside already."""

from __future__ import annotations

from dray.contract.findings import ConfigError
from dray.planning.plan import Plan


def srun(plan: Plan) -> list[str]:
    """What srun is told."""
    # Slurm mounts before anything of ours runs on the node: what is not required there cannot be looked for.
    binds = [bind for bind in plan.binds if bind.required]
    for bind in binds:
        if set(",:") & set(bind.path):
            raise ConfigError("Pyxis cannot mount a path with , or : in it", found=bind.path, fix="name another place")
    mounts = ",".join(f"{bind.path}:{bind.path}{'' if bind.write else ':ro'}" for bind in binds)
    return [
        f"--container-image={plan.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={plan.folder}",
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--container-writable",  # of the container's own copy, which goes at the end
    ]
