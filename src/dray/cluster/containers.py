"""The local cluster's containers and network: create, find, run in, remove."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import docker
from docker.models.containers import Container
from docker.types import Mount, NetworkingConfig

from dray.cluster.slurm_conf import CONTROLLER, Size, slurm_files

NAME = "dray-cluster"
USER = "dray"
SHARED = "/shared"
_LABEL = "dray.cluster=local"
_MUNGE_KEY = "/etc/munge/munge.key"


class Ended(NamedTuple):
    """A command that ran in a container."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of the cluster. A container with another configuration is replaced."""

    size: Size
    image: str
    base: str
    checkout: Path
    shared: Path
    uid: int
    gid: int

    @property
    def names(self) -> tuple[str, ...]:
        """In the order to start them: slurmctld waits seconds for every node whose name does not resolve yet."""
        return (*self.size.node_names, CONTROLLER)

    @property
    def labels(self) -> dict[str, str]:
        """What a later call must know about the cluster that it finds."""
        digest = hashlib.sha256(repr((self, slurm_files(self.size), self.environment)).encode()).hexdigest()
        return {
            "dray.cluster": "local",
            "dray.config": digest,
            "dray.base": self.base,
            "dray.nodes": str(self.size.nodes),
            "dray.gpus-per-node": str(self.size.gpus_per_node),
            "dray.checkout": str(self.checkout),
            "dray.shared": str(self.shared),
        }

    @property
    def environment(self) -> dict[str, str]:
        variables = {"DRAY_RUNS": f"{SHARED}/runs"}
        # Slurm fails a batch job without a message if it cannot write its output where it was submitted.
        if self.checkout.stat().st_uid != self.uid:
            variables["SBATCH_OUTPUT"] = f"{SHARED}/home/%x-%j.out"
        return variables


def find(client: docker.DockerClient) -> dict[str, Container]:
    """Its containers, running or not, by machine: controller, n1, n2 ..."""
    found = client.containers.list(all=True, filters={"label": _LABEL}, ignore_removed=True)
    return {container.labels["dray.machine"]: container for container in found}


def create(client: docker.DockerClient, config: Config, name: str, munge_key: bytes) -> Container:
    """A container of the cluster, complete but not started."""
    daemon = "slurmctld" if name == CONTROLLER else "slurmd"
    gpus = 0 if name == CONTROLLER else config.size.gpus_per_node
    api = client.api
    created = api.create_container(
        config.image,
        [daemon, str(config.uid), str(config.gid), str(gpus)],
        name=f"{NAME}-{name}",
        hostname=name,
        labels={**config.labels, "dray.machine": name},
        environment=config.environment,
        networking_config=NetworkingConfig({NAME: api.create_endpoint_config(aliases=[name])}),  # type: ignore[arg-type]  # its stub is wrong
        host_config=_host_config(api, config),
    )
    container = client.containers.get(created["Id"])
    container.put_archive("/", _tar(config.size, munge_key))
    return container


def _host_config(api: docker.APIClient, config: Config) -> dict[str, Any]:
    folders = {SHARED: config.shared, str(config.checkout): config.checkout}
    host_config = api.create_host_config(
        network_mode=NAME,
        mounts=[Mount(target, str(source), type="bind") for target, source in folders.items()],
        # Apptainer mounts its images; Slurm sets priorities and traces its tasks.
        cap_add=["SYS_ADMIN", "SYS_NICE", "SYS_PTRACE"],
        security_opt=["seccomp=unconfined", "apparmor=unconfined"],
        devices=["/dev/fuse:/dev/fuse:rwm"],
        # Docker's 64 MB are too small for the shared memory of a node's ranks.
        shm_size="1g",
        init=True,
    )
    # systempaths=unconfined in Docker's own client: no user namespace may mount /proc where parts are masked.
    return {**host_config, "MaskedPaths": [], "ReadonlyPaths": []}


def _tar(size: Size, munge_key: bytes) -> bytes:
    files = {f"/etc/slurm/{name}": (text.encode(), 0o644) for name, text in slurm_files(size).items()}
    files[_MUNGE_KEY] = (munge_key, 0o600)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, (content, mode) in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def munge_key_of(container: Container) -> bytes:
    """The key that its machines share."""
    pieces, _ = container.get_archive(_MUNGE_KEY)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        member = tar.extractfile(tar.getmembers()[0])
        return member.read() if member else b""


def ensure_network(client: docker.DockerClient) -> None:
    if not client.networks.list(filters={"label": _LABEL}):
        client.networks.create(NAME, driver="bridge", check_duplicate=True, labels={"dray.cluster": "local"})


def remove_networks(client: docker.DockerClient) -> list[str]:
    found = client.networks.list(filters={"label": _LABEL})
    for network in found:
        network.remove()
    return [str(network.name) for network in found]


def execute(
    container: Container,
    argv: Sequence[str],
    *,
    user: str = "root",
    workdir: str | None = None,
    env: Mapping[str, str] | None = None,
    show: bool = False,
) -> Ended:
    """Run a command in a container to its end; `show` passes its output on as it comes."""
    api = container.client.api if container.client else docker.APIClient()
    started = api.exec_create(
        container.id, list(argv), user=user, workdir=workdir, environment={"USER": user, **(env or {})}
    )
    outputs: tuple[list[bytes], list[bytes]] = ([], [])
    streams = (sys.stdout, sys.stderr)
    answers = api.exec_start(started["Id"], stream=True, demux=True)
    try:
        for pieces in answers:
            for piece, output, stream in zip(pieces, outputs, streams, strict=True):
                if piece:
                    output.append(piece)
                if piece and show:
                    stream.buffer.write(piece)
                    stream.flush()
    finally:
        answers._response.close()  # type: ignore[attr-defined]  # the stream's own close() leaves its connection open
    out, err = (b"".join(output).decode(errors="replace") for output in outputs)
    return Ended(int(api.exec_inspect(started["Id"])["ExitCode"]), out, err)


def last_lines(container: Container, count: int = 12) -> str:
    """The end of its daemons' logs."""
    return container.logs(tail=count).decode(errors="replace").strip()
