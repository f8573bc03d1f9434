"""The cluster on your desk: bring it up, keep it healthy, run in it, take it down."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import docker
from docker.errors import NotFound
from docker.models.containers import Container

from dray.cluster import containers
from dray.cluster.config import CONTROLLER, Size
from dray.cluster.containers import Ended, Spec
from dray.cluster.health import Health, look
from dray.config import checkout
from dray.containers.builder import trixie
from dray.containers.docker import attempt, base_image, build
from dray.contract.findings import UnfitError

_READY_S = 90
# Right after a start Slurm calls its nodes unresponsive for a moment; a restart then would only kill jobs.
_PATIENCE_S = 6
_POLL_S = 0.2
_REMAKE = "dray cluster down && dray cluster up"


class Desk:
    """The cluster of this machine's Docker Engine, whether it is up, half dead or not there."""

    def __init__(self, client: docker.DockerClient) -> None:
        self._client = client

    def look(self) -> Health | None:
        """How it is, or None where there is none."""
        with attempt("look at the cluster", fix=_REMAKE):
            return look(self._client)

    def up(
        self,
        *,
        nodes: int = 2,
        gpus_per_node: int = 2,
        base: str | None = None,
        share: Path | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Health:
        """Make what is missing, remake what differs, heal what is sick; return when jobs can start."""
        size = Size(nodes=nodes, gpus_per_node=gpus_per_node)
        before = self.look()
        spec = self._spec(
            size,
            base or os.environ.get("DRAY_CLUSTER_BASE") or (before.base if before else trixie(checkout.root())),
            share,
            say,
        )
        if "SBATCH_OUTPUT" in spec.environment:
            say(f"the cluster's user may not write in {spec.checkout}: batch jobs write to {spec.shared / 'home'}")
        with attempt("bring the cluster up", fix=_REMAKE):
            containers.ensure_network(self._client)
            kept = self._drop_stale(spec, say)
            key = containers.munge_key_of(next(iter(kept.values()))) if kept else secrets.token_bytes(128)
            for part in spec.parts:
                container = kept.get(part) or containers.create(self._client, spec, part, key)
                if container.status != "running":
                    say(f"starting {part}")
                    container.start()
            return self._ready(say)

    def down(self) -> list[str]:
        """Remove its containers and network; the shared folder stays. Returns what was removed."""
        with attempt("take the cluster down", fix="once more: dray cluster down"):
            found = containers.find(self._client)
            for container in found.values():
                _remove(container)
            return [*sorted(found), *containers.remove_networks(self._client)]

    def exec(
        self,
        argv: Sequence[str],
        *,
        user: str = containers.USER,
        workdir: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        node: str = CONTROLLER,
        show: bool = False,
    ) -> Ended:
        """Run a command on a part of the cluster, in the checkout unless told otherwise."""
        container = self.part(node)
        where = str(workdir) if workdir else container.labels["dray.checkout"]
        with attempt(f"run {argv[0]} on {node}"):
            return containers.execute(container, argv, user=user, workdir=where, env=env, show=show)

    def part(self, name: str) -> Container:
        """The running container of the controller or of a node."""
        with attempt("look for the cluster"):
            found = containers.find(self._client)
        if not found:
            raise UnfitError("there is no cluster", fix="dray cluster up")
        if name not in found:
            raise UnfitError("the cluster has no such part", wanted=", ".join(sorted(found)), found=name)
        if found[name].status != "running":
            raise UnfitError(f"{name} does not run", found=found[name].status, fix="dray cluster up")
        return found[name]

    @property
    def shared(self) -> Path:
        """The folder of this machine that the cluster's machines see as /shared."""
        return Path(self.part(CONTROLLER).labels["dray.shared"])

    def _spec(self, size: Size, base: str, share: Path | None, say: Callable[[str], None]) -> Spec:
        root = checkout.root(build=True)
        shared = (share or root / "build/cluster/shared").resolve()
        uid, gid = _owner(root)
        _make_shared(shared, uid, gid)
        chosen = base_image(self._client, base)
        image = build(
            self._client,
            context=root / "containers/cluster",
            dockerfile="Containerfile",
            tag="dray-cluster-node",
            args={"BASE": chosen},
            target="node",
            on_line=_steps(say),
        )
        return Spec(size=size, image=image, base=chosen, checkout=root, shared=shared, uid=uid, gid=gid)

    def _drop_stale(self, spec: Spec, say: Callable[[str], None]) -> dict[str, Container]:
        """Remove what no longer fits or was never started; what stays, by part."""
        kept = {}
        for part, container in containers.find(self._client).items():
            fits = part in spec.parts and container.labels["dray.spec"] == spec.labels["dray.spec"]
            if fits and container.status in ("running", "exited"):
                kept[part] = container
            else:
                say(f"removing the old {part}")
                _remove(container)
        return kept

    def _ready(self, say: Callable[[str], None]) -> Health:
        begun = time.monotonic()
        restarted = False
        while True:
            now = look(self._client)
            if now and now.ready:
                return now
            waited = time.monotonic() - begun
            if now is None or now.ended or waited > _READY_S:
                raise UnfitError(
                    "the cluster does not come up",
                    wanted=f"every node ready for jobs within {_READY_S} s",
                    found="\n".join(now.troubles) if now else "its containers are gone",
                    fix=_REMAKE,
                )
            if waited > _PATIENCE_S and not restarted:
                self._restart_stuck(now, say)
                restarted = True
            self._resume_drained(now)
            time.sleep(_POLL_S)

    def _restart_stuck(self, now: Health, say: Callable[[str], None]) -> None:
        for part in now.parts:
            if part.stuck:
                say(f"restarting {part.name}")
                self.part(part.name).restart(timeout=5)

    def _resume_drained(self, now: Health) -> None:
        for part in now.parts:
            if "drain" in part.slurm:
                self.exec(["scontrol", "update", f"NodeName={part.name}", "State=RESUME"], user="root")


def _owner(root: Path) -> tuple[int, int]:
    """Whose files the cluster's user writes: the caller's; under sudo the checkout owner's; never root's."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    found = root.stat()
    return (found.st_uid, found.st_gid) if found.st_uid != 0 else (1000, 1000)


def _steps(say: Callable[[str], None]) -> Callable[[str], None]:
    """Of all that a build says, the steps that really run: those already built cost nothing."""
    step = ""

    def on_line(line: str) -> None:
        nonlocal step
        if line.startswith("Step "):
            step = line
        elif line.startswith(" ---> Running in"):
            say(step)

    return on_line


def _make_shared(shared: Path, uid: int, gid: int) -> None:
    for folder in (shared, shared / "home", shared / "runs"):
        folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(folder, uid, gid)


def _remove(container: Container) -> None:
    with suppress(NotFound):
        container.remove(force=True, v=True)
