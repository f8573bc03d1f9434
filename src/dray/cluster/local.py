"""The local cluster: start it, repair it, run commands in it, remove it."""

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

from dray.clients.builder import build, trixie
from dray.clients.docker import attempt, base_image
from dray.cluster import containers, health
from dray.cluster.containers import Config, Ended
from dray.cluster.health import Health
from dray.cluster.slurm_conf import CONTROLLER, Size
from dray.config import dray_home
from dray.contract.findings import UnfitError

_READY_S = 90
# Right after a start Slurm calls its nodes unresponsive for a moment; a restart then would only kill jobs.
_RESTART_AFTER_S = 6
_POLL_S = 0.2
_REMAKE = "dray cluster down && dray cluster up"


class LocalCluster:
    """The cluster of this machine's Docker Engine, in whatever state it is."""

    def __init__(self, client: docker.DockerClient) -> None:
        self._client = client

    def health(self) -> Health | None:
        """None if there is no cluster."""
        with attempt("look at the cluster", fix=_REMAKE):
            return health.health(self._client)

    def up(
        self,
        *,
        nodes: int = 2,
        gpus_per_node: int = 2,
        base: str | None = None,
        share: Path | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Health:
        """Create what is missing, replace what differs, restart what does not answer; return when jobs can start."""
        size = Size(nodes=nodes, gpus_per_node=gpus_per_node)
        before = self.health()
        base = base or os.environ.get("DRAY_CLUSTER_BASE") or (before.base if before else trixie(dray_home.root()))
        config = self._config(size, base, share, say)
        if "SBATCH_OUTPUT" in config.environment:
            say(f"the cluster's user cannot write in {config.checkout}: batch jobs write to {config.shared / 'home'}")
        with attempt("bring the cluster up", fix=_REMAKE):
            containers.ensure_network(self._client)
            kept = self._remove_stale(config, say)
            key = containers.munge_key_of(next(iter(kept.values()))) if kept else secrets.token_bytes(128)
            for name in config.names:
                container = kept.get(name) or containers.create(self._client, config, name, key)
                if container.status != "running":
                    say(f"starting {name}")
                    container.start()
            return self._ready(say)

    def down(self) -> list[str]:
        """Remove its containers and network; the shared folder stays. Returns what was removed."""
        with attempt("take the cluster down", fix="dray cluster down"):
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
        """Run a command on a machine of the cluster, by default in the checkout."""
        container = self.machine(node)
        folder = str(workdir) if workdir else container.labels["dray.checkout"]
        with attempt(f"run {argv[0]} on {node}"):
            return containers.execute(container, argv, user=user, workdir=folder, env=env, show=show)

    def machine(self, name: str) -> Container:
        """The running container of the controller or of a node."""
        with attempt("look for the cluster"):
            found = containers.find(self._client)
        if not found:
            raise UnfitError("there is no cluster", fix="dray cluster up")
        if name not in found:
            raise UnfitError("the cluster has no such machine", wanted=", ".join(sorted(found)), found=name)
        if found[name].status != "running":
            raise UnfitError(f"{name} is not running", found=found[name].status, fix="dray cluster up")
        return found[name]

    @property
    def shared(self) -> Path:
        """The folder of this machine that the cluster's machines see as /shared."""
        return Path(self.machine(CONTROLLER).labels["dray.shared"])

    def _config(self, size: Size, base: str, share: Path | None, say: Callable[[str], None]) -> Config:
        root = dray_home.root(build=True)
        shared = (share or root / "build/cluster/shared").resolve()
        uid, gid = _owner(root)
        _make_shared(shared, uid, gid)
        chosen = base_image(self._client, base, say=say)
        image = build(self._client, root, "node", tag="dray-cluster-node", base=chosen, on_line=_steps(say))
        return Config(size=size, image=image, base=chosen, checkout=root, shared=shared, uid=uid, gid=gid)

    def _remove_stale(self, config: Config, say: Callable[[str], None]) -> dict[str, Container]:
        """Remove containers of another configuration, or never started; return the others, by machine."""
        kept = {}
        for name, container in containers.find(self._client).items():
            same = name in config.names and container.labels["dray.config"] == config.labels["dray.config"]
            if same and container.status in ("running", "exited"):
                kept[name] = container
            else:
                say(f"removing the old {name}")
                _remove(container)
        return kept

    def _ready(self, say: Callable[[str], None]) -> Health:
        begun = time.monotonic()
        restarted = False
        while True:
            now = health.health(self._client)
            if now and now.ready:
                return now
            waited = time.monotonic() - begun
            if now is None or now.ended or waited > _READY_S:
                raise UnfitError(
                    "the cluster did not become ready",
                    wanted=f"every node ready for jobs within {_READY_S} s",
                    found="\n".join(now.problems) if now else "its containers are gone",
                    fix=_REMAKE,
                )
            if waited > _RESTART_AFTER_S and not restarted:
                self._restart_stuck(now, say)
                restarted = True
            self._resume_drained(now)
            time.sleep(_POLL_S)

    def _restart_stuck(self, now: Health, say: Callable[[str], None]) -> None:
        for machine in now.machines:
            if machine.stuck:
                say(f"restarting {machine.name}")
                self.machine(machine.name).restart(timeout=5)

    def _resume_drained(self, now: Health) -> None:
        for machine in now.machines:
            if "drain" in machine.slurm:
                self.exec(["scontrol", "update", f"NodeName={machine.name}", "State=RESUME"], user="root")


def _owner(root: Path) -> tuple[int, int]:
    """The ids of the cluster's user: the caller's, or the checkout owner's under sudo; never root's."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    owner = root.stat()
    return (owner.st_uid, owner.st_gid) if owner.st_uid != 0 else (1000, 1000)


def _steps(say: Callable[[str], None]) -> Callable[[str], None]:
    """From the output of a build, the steps that run; those already built take no time."""
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
