"""Without Slurm: Podman in Docker's place, and machines that only a file names."""

from __future__ import annotations

import json
import os
import resource
import secrets
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from docker.types import Mount

from dray.clients import docker

SHORT = ("train.steps=4", "train.warmup_steps=0", "train.log_every=1")
pytestmark = pytest.mark.docker_image


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "attempt-1" / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Podman with the image that Docker has. Its own limits are above those that this machine lets it set."""
    if not shutil.which("podman"):
        if os.environ.get("DRAY_TEST_ALL") == "1":
            pytest.fail("DRAY_TEST_ALL=1, and podman is not installed")
        pytest.skip("podman is not installed")
    tmp_path = tmp_path_factory.mktemp("podman")
    files, processes = (resource.getrlimit(one)[1] for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    limits = {"nofile": min(files, 20_000), "nproc": min(processes, 30_000) if processes > 0 else 30_000}
    said = ", ".join(f'"{name}={number}:{number}"' for name, number in limits.items())
    (tmp_path / "containers.conf").write_text(f'[containers]\ndefault_ulimits = [{said}]\n[engine]\nruntime = "runc"\n')
    env = {**os.environ, "CONTAINERS_CONF": str(tmp_path / "containers.conf")}
    with subprocess.Popen(["docker", "save", "dray:cpu"], stdout=subprocess.PIPE) as saved:
        subprocess.run(["podman", "load", "--quiet"], stdin=saved.stdout, env=env, check=True)
    yield env
    subprocess.run(["podman", "rmi", "--force", "localhost/dray:cpu"], env=env, check=True)


@pytest.mark.slow
def test_podman_and_docker_train_the_same(root: Path, tmp_path: Path, podman: dict[str, str]) -> None:
    found = {}
    for engine in ("docker", "podman"):
        words = ("--engine", engine, "ranks_per_node=1", "checkpoint.every=4", *SHORT)
        ended = subprocess.run(
            [sys.executable, "-m", "dray", "run", "recipes/smoke-cpu.toml", *words],
            cwd=root, env={**podman, "DRAY_RUNS": str(tmp_path / engine)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (folder,) = (tmp_path / engine).glob("[!.]*")
        found[engine] = losses(folder)
        mine = f"evaluate.mine.dataset={root}/recipes/tiny/validation.jsonl"
        for words, said in {
            "docker": [
                (("model", "generate", folder, "one: the", "--tokens", "4"), "one: the"),
                (("model", "eval", folder, mine), "evaluation mine loss"),
            ],
            "podman": [(("model", "export", folder, "--to", tmp_path / "made" / "model"), f"{tmp_path}/made/model: ")],
        }[engine]:
            after = subprocess.run(
                [sys.executable, "-m", "dray", *words, "--engine", engine],
                cwd=root, env=podman, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert (after.returncode, said in after.stdout) == (0, True), after.stdout + after.stderr
    assert found["podman"] == pytest.approx(found["docker"], rel=1e-6)
    for words in (("ps", "--all"), ("network", "ls")):
        left = subprocess.run(["podman", *words], env=podman, capture_output=True, text=True, check=True).stdout
        assert "dray-" not in left


@pytest.mark.slow
def test_podman_without_the_image(root: Path, tmp_path: Path, podman: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "dray", "run", "recipes/smoke-cpu.toml", "--engine", "podman", "image=cuda12"],
        cwd=root, env={**podman, "DRAY_RUNS": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (
        78,
        "dray: the image does not exist\n  wanted: localhost/dray:cuda12 in Podman\n"
        "  fix:    dray image build cuda12 --format podman\n",
    )


@pytest.mark.slow
def test_two_machines_and_a_file(root: Path, tmp_path: Path) -> None:
    """Two containers are the machines: no Slurm, no SSH, no shared disk, and the same line typed on each."""
    (tmp_path / "hosts").write_text("box1 slots=2\nbox2 slots=2\n")
    (tmp_path / "secret").write_text(secrets.token_hex(32))
    (tmp_path / "secret").chmod(0o600)
    name = f"dray-test-{secrets.token_hex(4)}"
    mounts = [
        Mount(target="/work", source=str(root), type="bind", read_only=True),
        Mount(target="/hosts", source=str(tmp_path / "hosts"), type="bind", read_only=True),
        Mount(target="/secret", source=str(tmp_path / "secret"), type="bind", read_only=True),
    ]
    words = ["dray", "run", "/work/recipes/smoke-cpu.toml", "--hostfile", "/hosts", "--secret", "/secret"]
    words += ["--runs", "/tmp/runs", *SHORT]
    said = f"{' '.join(words)}; code=$?; cat /tmp/runs/*/*/metrics.jsonl /tmp/runs/*/*/result.json; exit $code"
    with closing(docker.client()) as client:
        network = client.networks.create(name, internal=True)
        machines = []
        try:
            for box in ("box1", "box2"):
                made = client.api.create_container(
                    "dray:cpu",
                    ["bash", "-c", said],
                    hostname=box,
                    environment={"DRAY_HOME": "/work"},
                    host_config=client.api.create_host_config(mounts=mounts, shm_size="1g", network_mode=name),
                    networking_config=client.api.create_networking_config(
                        {name: client.api.create_endpoint_config(aliases=[box])}
                    ),
                )
                machines.append(client.containers.get(made["Id"]))
            for machine in machines:
                machine.start()
            codes = [machine.wait()["StatusCode"] for machine in machines]
            output = [machine.logs().decode() for machine in machines]
        finally:
            for machine in machines:
                machine.remove(force=True)
            network.remove()
    assert codes == [0, 0], "\n".join(output)
    assert '"hosts": ["box1", "box1", "box2", "box2"]' in output[0]
    for one in output:
        assert "done: " in one
        assert '"status": "done"' in one
