"""The built images from inside: the same files as a SIF and as a Docker image.

DRAY_TEST_VARIANT=cuda looks at another variant's, once `dray image build cuda --format sif --format docker` made them.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from docker.types import Mount

from dray import __version__
from dray.clients import docker
from dray.images.locks import lock
from dray.images.sif import record, verify
from helpers import ROOT

VARIANT = os.environ.get("DRAY_TEST_VARIANT", "cpu")
SOURCE, TAG = ROOT / "containers" / VARIANT, f"dray:{VARIANT}"
IMAGE = tomllib.loads((SOURCE / "image.toml").read_text())
# torch as it names itself in the lock's terms and in its own, its CUDA, DeepSpeed's operators that are compiled in.
HOLDS = {
    "cpu": (
        "2.13.0+cpu",
        "2.13.0+cpu",
        None,
        ["async_io", "cpu_adam", "deepspeed_shm_comm", "fused_adam", "pin_memory"],
    ),
    "cuda": ("2.13.0", "2.13.0+cu130", "13.0", ["async_io", "cpu_adam", "fused_adam", "pin_memory"]),
}
PACKAGED, TORCH, CUDA, OPERATORS = HOLDS[VARIANT]
# Printed inside an image, as the last line.
LOOK = r"""
import importlib.util, json, os, pathlib, subprocess, sys
import torch, transformers
from deepspeed.git_version_info import installed_ops
def said(*argv):
    done = subprocess.run(argv, capture_output=True, text=True)
    return [done.returncode, done.stdout.strip()]
left, stale = [], []
for folder, folders, files in os.walk("/"):
    if folder == "/":
        folders[:] = set(folders) - {"proc", "sys", "dev", "tmp"}
    left += [f"{folder}/{name}" for name in files
             if name.endswith((".whl", ".deb")) or name in ("pip.conf", "requirements.lock", "nvcc", "cicc")]
site = pathlib.Path(sys.prefix, "lib", "python3.11", "site-packages")
for compiled in (*site.rglob("*.pyc"), *pathlib.Path("/usr/lib/python3.11").rglob("*.pyc")):
    with compiled.open("rb") as file:
        if file.read(8)[4:] != b"\1\0\0\0":  # unchecked hash
            stale.append(str(compiled))
certificates = pathlib.Path("/etc/ca-certificates.conf").read_text().splitlines()
print(json.dumps({
    "python": sys.executable,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "pip": importlib.util.find_spec("pip") is not None,
    "dray": said("dray", "--version"),
    "plan": said("dray", "plan", "--help")[0],
    "deepspeed": said("ds_report")[0],
    "operators": sorted(name for name, there in installed_ops.items() if there),
    "compiler": said("gcc", "-dumpversion")[0],
    "runner": importlib.util.find_spec("dray.runner.__main__") is not None,
    "left": left,
    "stale": stale,
    "times": sorted({int(path.lstat().st_mtime) for path in site.iterdir()}),
    "mnt": os.listdir("/mnt"),
    "lists": os.listdir("/var/lib/apt/lists"),
    "logs": [str(path) for path in pathlib.Path("/var/log").rglob("*") if path.is_file()],
    "own certificates": os.listdir("/usr/local/share/ca-certificates"),
    "more certificates": pathlib.Path("/etc/ssl/certs/ca-certificates.crt").read_text().count("BEGIN CERTIFICATE")
        - sum(line[:1] not in ("#", "!", "") for line in certificates),
    "environment": {name: os.environ.get(name) for name in (
        "PATH", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "http_proxy", "SSL_CERT_FILE")},
    "image": json.loads(pathlib.Path("/opt/dray/image.json").read_text()),
    "materials": sorted({part["purl"].split("/")[0] for part in
        json.loads(pathlib.Path("/opt/dray/sbom.json").read_text())["components"]}),
}))
"""
pytestmark = [pytest.mark.docker, pytest.mark.docker_image, pytest.mark.cluster]


@pytest.fixture(scope="module")
def client():
    with closing(docker.client()) as client:
        yield client


@pytest.fixture(scope="module")
def apptainer(cluster) -> Callable[..., str]:
    """Apptainer on a node of the cluster, as its ordinary user."""

    def run(*command: str | Path) -> str:
        code, out, err = cluster.exec(["apptainer", "--quiet", *map(str, command)])
        assert code == 0, err
        return out

    return run


@pytest.fixture(scope="module")
def sif() -> Path:
    return ROOT / "build" / f"dray-{VARIANT}.sif"


@pytest.fixture(params=[pytest.param("docker", marks=pytest.mark.slow), "sif"])
def seen(request, client, apptainer, sif) -> dict:
    """What LOOK sees inside."""
    if request.param == "docker":
        out = client.containers.run(
            TAG, ["python3", "-c", LOOK], name="dray-test-look", remove=True, network_disabled=True
        )
        return json.loads(out.splitlines()[-1])
    return json.loads(apptainer("exec", "--contain", "--cleanenv", sif, "python3", "-c", LOOK).splitlines()[-1])


def test_what_an_image_holds(seen, sif):
    image = seen.pop("image")
    packages = {name.replace("_", "-"): version for name, version in image.pop("packages").items()}
    locked = {pin.name: pin.version for pin in lock.read(SOURCE / "requirements.lock")}
    assert packages == {**locked, "torch": PACKAGED, "dray": __version__}
    assert image.pop("python").startswith("3.11.")
    assert image == {
        "variant": VARIANT,
        "accelerator": VARIANT,
        "architectures": IMAGE.get("architectures", []),
        "driver": IMAGE.get("driver"),
        "base": record.read(sif).base,
        "dray": __version__,
    }
    assert seen == {
        "python": "/opt/dray/bin/python3",
        "torch": TORCH,
        "cuda": CUDA,
        "pip": False,
        "dray": [0, f"dray {__version__}"],
        "plan": 0,
        "deepspeed": 0,
        "operators": OPERATORS,
        "compiler": 0,
        "runner": True,
        "left": [],
        "stale": [],
        "times": [lock.epoch(SOURCE / "requirements.lock")],
        "mnt": [],
        "lists": [],
        "logs": [],
        "own certificates": [],
        "more certificates": 0,
        "environment": {
            "PATH": "/opt/dray/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/layer/bin",
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "http_proxy": None,
            "SSL_CERT_FILE": None,
        },
        "materials": ["pkg:deb", "pkg:pypi"],
    }


def test_both_carry_the_labels(client, apptainer, sif):
    wanted = IMAGE["labels"]
    known = record.read(sif)
    assert client.images.get(TAG).labels == {**wanted, "dray.inputs": known.inputs}
    assert json.loads(apptainer("inspect", "--labels", "--json", sif))["data"]["attributes"]["labels"] == wanted


def test_the_record_is_of_this_image(sif):
    known = record.read(sif)
    assert verify.digest(sif) == f"sha256:{known.sif.sha256}"
    assert known.epoch == lock.epoch(SOURCE / "requirements.lock")


@pytest.mark.slow
def test_its_own_checks_pass(client):
    out = client.containers.run(
        TAG,
        ["python3", "-m", "dray.checks", "--json"],
        name="dray-test-checks",
        remove=True,
        network_disabled=True,
    )
    results = json.loads(out)["results"]
    assert [one for one in results if one["level"] == "error"] == []
    assert {one["problem"] for one in results if one["level"] == "ok"} >= {
        *("torch", "triton", "transformers", "datasets", "C extension", "torch.compile"),
        *("deepspeed cpu_adam", "deepspeed async_io", "deepspeed fused_adam"),
        *(f"triton for {architecture}" for architecture in IMAGE.get("architectures", [])),
    }


# What would be compiled at run time fails there.
NO_COMPILER = "mkdir /tmp/bin && ln -s /opt/dray/bin/python3 /tmp/bin/ && PATH=/tmp/bin exec /opt/dray/bin/python3"


@pytest.mark.skipif(VARIANT != "cpu", reason="without a GPU only the cpu image has all that DeepSpeed asks for")
@pytest.mark.parametrize(
    ("case", "operator"),
    [
        pytest.param("zero2", "fused_adam", marks=pytest.mark.slow),
        pytest.param("zero3", "fused_adam", marks=pytest.mark.slow),
        pytest.param("zero3-offload", "cpu_adam", marks=pytest.mark.slow),
        pytest.param("zero3-nvme", "async_io", marks=pytest.mark.slow),
    ],
)
def test_deepspeed_compiles_nothing_at_run_time(client, case, operator):
    script = ROOT / "tests" / "cluster" / "zero.py"
    run = f"{NO_COMPILER} -m torch.distributed.run --standalone --nproc-per-node=2 /zero.py {case}"
    out = client.containers.run(
        TAG,
        ["bash", "-c", run],
        name=f"dray-test-{case}",
        remove=True,
        network_mode="none",
        hostname="localhost",  # which torchrun looks up
        shm_size="1g",
        mounts=[Mount(target="/zero.py", source=str(script), type="bind", read_only=True)],
    )
    said = json.loads(out.splitlines()[-1])
    assert (said["case"], said["world"], said["compiled"]) == (case, 2, [])
    assert operator in said["operators"]
    assert said["losses"][-1] < said["losses"][0]
