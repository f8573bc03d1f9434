"""Programs that look into images: this machine's own, or the builder container's. None of them gets a network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from dray import dockerd, process
from dray.config import checkout
from dray.contract.findings import UnfitError
from dray.images import builder, container
from dray.process import Done


def run(argv: Sequence[str], *, binds: Mapping[Path, bool], env: Mapping[str, str] | None = None) -> Done:
    """Run to the end. `binds` are the paths in argv, and whether the program writes there."""
    if process.which(argv[0]):
        return process.run(argv, env=env, check=False)
    try:
        client = dockerd.client()
    except UnfitError as error:
        raise UnfitError(
            f"{argv[0]} is not on this machine, nor a Docker Engine to run it in",
            found=error.problem,
            fix="install apptainer and squashfs-tools, or Docker Engine",
        ) from error
    with closing(client), dockerd.doing(f"run {argv[0]} in a container"):
        image = builder.image(client, checkout.root(), on_line=_quietly)
        mounts = [container.bind(path, read_only=not writes) for path, writes in binds.items()]
        # As the caller, root or not: unlike builds, none of these programs makes namespaces.
        user = f"{os.getuid()}:{os.getgid()}"
        with container.started(client, image, list(argv), mounts=mounts, environment=env or {}, user=user) as running:
            code = int(running.wait()["StatusCode"])
            out, err = (running.logs(stdout=out, stderr=not out).decode(errors="replace") for out in (True, False))
    return Done(argv=tuple(argv), code=code, out=out, err=err)


def _quietly(_line: str) -> None:
    """Building the builder is not what the caller asked for."""
