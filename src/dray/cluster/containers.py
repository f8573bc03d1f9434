"""The desk's containers and network: make, find, run in, remove."""

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

from dray.cluster.config import CONTROLLER, Size, slurm_files

NAME = "dray-desk"
USER = "dray"
SHARED = "/shared"
_LABEL = "dray.cluster=desk"
_MUNGE_KEY = "/etc/munge/munge.key"


class Ended(NamedTuple):
    """A command that ran in a container."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the desk is to be. A container made for another one is remade."""

    size: Size
    image: str
    base: str
    checkout: Path
    shared: Path
    uid: int
    gid: int

    @property
    def parts(self) -> tuple[str, ...]:
        """In the order to start them: slurmctld waits seconds for every node whose name means nothing yet."""
        return (*self.size.node_names, CONTROLLER)

    @property
    def labels(self) -> dict[str, str]:
        """What a later call must know about the desk it finds."""
        digest = hashlib.sha256(repr((self, slurm_files(self.size), self.environment)).encode()).hexdigest()
        return {
            "dray.cluster": "desk",
            "dray.spec": digest,
            "dray.base": self.base,
            "dray.nodes": str(self.size.nodes),
            "dray.gpus-per-node": str(self.size.gpus_per_node),
            "dray.checkout": str(self.checkout),
            "dray.shared": str(self.shared),
        }

    @property
    def environment(self) -> dict[str, str]:
        found = {"DRAY_RUNS": f"{SHARED}/runs"}
        # Slurm fails a batch job without a word when it cannot write its output where it was submitted.
        if self.checkout.stat().st_uid != self.uid:
            found["SBATCH_OUTPUT"] = f"{SHARED}/home/%x-%j.out"
        return found


def find(client: docker.DockerClient) -> dict[str, Container]:
    """The desk's containers, in whatever state, by part: controller, n1, n2 ..."""
    found = client.containers.list(all=True, filters={"label": _LABEL}, ignore_removed=True)
    return {container.labels["dray.part"]: container for container in found}


def create(client: docker.DockerClient, spec: Spec, part: str, munge_key: bytes) -> Container:
    """A container of the desk, complete but not started."""
    daemon = "slurmctld" if part == CONTROLLER else "slurmd"
    gpus = 0 if part == CONTROLLER else spec.size.gpus_per_node
    api = client.api
    made = api.create_container(
        spec.image,
        [daemon, str(spec.uid), str(spec.gid), str(gpus)],
        name=f"{NAME}-{part}",
        hostname=part,
        labels={**spec.labels, "dray.part": part},
        environment=spec.environment,
        networking_config=NetworkingConfig({NAME: api.create_endpoint_config(aliases=[part])}),  # type: ignore[arg-type]  # its stub describes another one,
        host_config=_host_config(api, spec),
    )
    container = client.containers.get(made["Id"])
    container.put_archive("/", _tar(spec.size, munge_key))
    return container


def _host_config(api: docker.APIClient, spec: Spec) -> dict[str, Any]:
    folders = {SHARED: spec.shared, str(spec.checkout): spec.checkout}
    made = api.create_host_config(
        network_mode=NAME,
        mounts=[Mount(target, str(source), type="bind") for target, source in folders.items()],
        # Apptainer mounts its images; Slurm sets priorities and looks into its tasks.
        cap_add=["SYS_ADMIN", "SYS_NICE", "SYS_PTRACE"],
        security_opt=["seccomp=unconfined", "apparmor=unconfined"],
        devices=["/dev/fuse:/dev/fuse:rwm"],
        # Docker's 64 MB are too few for the ranks of a node to talk through.
        shm_size="1g",
        init=True,
    )
    # systempaths=unconfined in Docker's own client: no user namespace may mount /proc where parts are masked.
    return {**made, "MaskedPaths": [], "ReadonlyPaths": []}


def _tar(size: Size, munge_key: bytes) -> bytes:
    files = {f"/etc/slurm/{name}": (text.encode(), 0o644) for name, text in slurm_files(size).items()}
    files[_MUNGE_KEY] = (munge_key, 0o600)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for path, (content, mode) in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def munge_key_of(container: Container) -> bytes:
    """The key that the desk already shares."""
    pieces, _ = container.get_archive(_MUNGE_KEY)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        member = tar.extractfile(tar.getmembers()[0])
        return member.read() if member else b""


def ensure_network(client: docker.DockerClient) -> None:
    if not client.networks.list(filters={"label": _LABEL}):
        client.networks.create(NAME, driver="bridge", check_duplicate=True, labels={"dray.cluster": "desk"})


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
    kept: tuple[list[bytes], list[bytes]] = ([], [])
    streams = (sys.stdout, sys.stderr)
    answers = api.exec_start(started["Id"], stream=True, demux=True)
    try:
        for pieces in answers:
            for piece, keep, stream in zip(pieces, kept, streams, strict=True):
                if piece:
                    keep.append(piece)
                if piece and show:
                    stream.buffer.write(piece)
                    stream.flush()
    finally:
        answers._response.close()  # type: ignore[attr-defined]  # the stream's own close() leaves its connection open
    out, err = (b"".join(keep).decode(errors="replace") for keep in kept)
    return Ended(int(api.exec_inspect(started["Id"])["ExitCode"]), out, err)


def last_lines(container: Container, count: int = 12) -> str:
    """The end of what its daemons said."""
    return container.logs(tail=count).decode(errors="replace").strip()
