"""The built images from inside, and builds with planted marks of the host."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from docker.types import Mount

from dray import __version__, dockerd
from dray.errors import UnfitError
from dray.images import builder, inputs, oci, sif

ROOT = Path(__file__).resolve().parents[2]
# New each time: Docker would not run the steps again for inputs that it knows.
MARK = f"mark-{secrets.token_hex(8)}"
CONTROL = "control-word-of-the-step"
# Printed inside an image, as the last line.
LOOK = r"""
import importlib.util, json, os, pathlib, subprocess, sys
import torch, transformers
def said(*argv):
    done = subprocess.run(argv, capture_output=True, text=True)
    return [done.returncode, done.stdout.strip()]
left = []
for folder, folders, files in os.walk("/"):
    if folder == "/":
        folders[:] = set(folders) - {"proc", "sys", "dev", "tmp"}
    left += [f"{folder}/{name}" for name in files if name.endswith(".whl") or name in ("pip.conf", "requirements.lock")]
certificates = pathlib.Path("/etc/ca-certificates.conf").read_text().splitlines()
print(json.dumps({
    "python": sys.executable,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "transformers": transformers.__version__,
    "pip": importlib.util.find_spec("pip") is not None,
    "dray": said("dray", "--version"),
    "plan": said("dray", "plan", "--help")[0],
    "runner": importlib.util.find_spec("dray.runner.__main__") is not None,
    "left": left,
    "mnt": os.listdir("/mnt"),
    "lists": os.listdir("/var/lib/apt/lists"),
    "logs": [str(path) for path in pathlib.Path("/var/log").rglob("*") if path.is_file()],
    "own certificates": os.listdir("/usr/local/share/ca-certificates"),
    "more certificates": pathlib.Path("/etc/ssl/certs/ca-certificates.crt").read_text().count("BEGIN CERTIFICATE")
        - sum(line[:1] not in ("#", "!", "") for line in certificates),
    "environment": {name: os.environ.get(name) for name in (
        "PATH", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "http_proxy", "SSL_CERT_FILE")},
    "image": json.loads(pathlib.Path("/opt/dray/image.json").read_text()),
}))
"""
STEP = f"""#!/usr/bin/env bash
source "$(dirname "$0")/lib.sh"
log::line "sees $http_proxy and $(cat "$INPUTS/host/ca.crt") and $(ls "$INPUTS/wheels")"
mkdir -p "$VENV/bin"
ln -s /bin/true "$VENV/bin/python3"
echo {CONTROL} >"$VENV/control"
"""


@pytest.fixture(scope="module")
def client():
    with closing(dockerd.client()) as client:
        yield client


@contextmanager
def _unless_unfit(variable: str):
    try:
        yield
    except UnfitError as error:
        if os.environ.get("DRAY_TEST_ALL") == "1":
            raise
        pytest.skip(f"{error.problem} (set {variable} to the base that the images were built with)")


@pytest.fixture(scope="module")
def base(client) -> str:
    """What the tiny images are built on: the base of the real ones."""
    base = os.environ.get("DRAY_IMAGE_BASE") or inputs.image(ROOT, "cpu").base
    with _unless_unfit("DRAY_IMAGE_BASE"):
        dockerd.base_image(client, base)
    return base


@pytest.fixture(scope="module")
def apptainer(client) -> Callable[..., tuple[int, str]]:
    """Apptainer on an image, as an ordinary user."""
    with _unless_unfit("DRAY_CLUSTER_BASE"):
        tools = builder.image(client, ROOT, on_line=lambda line: None)

    def run(image: Path, *command: str) -> tuple[int, str]:
        mounts = [Mount(target="/image.sif", source=str(image), type="bind", read_only=True)]
        argv = ["apptainer", "--quiet", *command]
        with builder.container(client, tools, argv, mounts=mounts, environment={}) as inside:
            code = inside.wait()["StatusCode"]
            return code, inside.logs(stdout=True, stderr=False).decode()

    return run


# The builder has no FUSE.
EXEC = ("exec", "--unsquash", "--contain", "/image.sif")


@pytest.fixture(params=["docker", "sif"])
def seen(request, client, apptainer) -> dict:
    """What LOOK sees inside."""
    if request.param == "docker":
        out = client.containers.run(
            "dray:cpu", ["python3", "-c", LOOK], name="dray-test-look", remove=True, network_disabled=True
        )
        return json.loads(out.splitlines()[-1])
    code, said = apptainer(ROOT / "build" / "dray-cpu.sif", *EXEC, "python3", "-c", LOOK)
    assert code == 0, said
    return json.loads(said.splitlines()[-1])


def _locked() -> dict[str, str]:
    lock = (ROOT / "containers" / "cpu" / "requirements.lock").read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", lock, re.MULTILINE))


@pytest.mark.docker
@pytest.mark.docker_image
@pytest.mark.sif
def test_what_an_image_holds(seen):
    image = seen.pop("image")
    packages = {name.replace("_", "-"): version for name, version in image.pop("packages").items()}
    assert packages == {**_locked(), "torch": "2.13.0+cpu", "dray": __version__}
    assert image.pop("python").startswith("3.11.")
    assert image == {"variant": "cpu", "dray": __version__}
    assert seen == {
        "python": "/opt/dray/bin/python3",
        "torch": "2.13.0+cpu",
        "cuda": None,
        "transformers": _locked()["transformers"],
        "pip": False,
        "dray": [0, f"dray {__version__}"],
        "plan": 0,
        "runner": True,
        "left": [],
        "mnt": [],
        "lists": [],
        "logs": [],
        "own certificates": [],
        "more certificates": 0,
        "environment": {
            "PATH": "/opt/dray/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "http_proxy": None,
            "SSL_CERT_FILE": None,
        },
    }


@pytest.mark.docker
@pytest.mark.docker_image
@pytest.mark.sif
def test_both_carry_the_labels(client, apptainer):
    wanted = tomllib.loads((ROOT / "containers" / "cpu" / "image.toml").read_text())["labels"]
    assert client.images.get("dray:cpu").labels == wanted
    code, said = apptainer(ROOT / "build" / "dray-cpu.sif", "inspect", "--labels", "--json", "/image.sif")
    assert code == 0
    labels = json.loads(said)["data"]["attributes"]["labels"]
    assert {key: labels.get(key) for key in wanted} == wanted


@pytest.fixture
def tiny(base, apptainer, tmp_path, monkeypatch) -> Path:
    """The inputs of an image of one small step, with the real definition, Containerfile and runner of steps.

    It comes after what needs a network: the proxy that it sets leads nowhere.
    """
    checkout = tmp_path / "my work"
    shutil.copytree(ROOT / "containers", checkout / "containers")
    for step in (checkout / "containers" / "steps").glob("[0-9]*"):
        step.unlink()
    (checkout / "containers" / "steps" / "30-look.sh").write_text(STEP)
    wheels = checkout / "wheels"
    wheels.mkdir()
    (wheels / "a-1-py3-none-any.whl").write_text(MARK)
    (checkout / "bundle.crt").write_text(f"{MARK}-bundle")
    monkeypatch.setenv("SSL_CERT_FILE", str(checkout / "bundle.crt"))
    monkeypatch.setenv("http_proxy", f"http://{MARK}.invalid:1")
    return inputs.lay_out(checkout, inputs.image(checkout, "cpu"), fetched=wheels, own=wheels / "a-1-py3-none-any.whl")


SEEN = f"dray: sees http://{MARK}.invalid:1 and {MARK}-bundle and a-1-py3-none-any.whl"


@pytest.mark.docker
def test_nothing_of_the_host_stays_in_a_docker_image(client, base, tiny):
    # Wheels come into the Docker build only after the steps below 50.
    step = tiny / "steps" / "30-look.sh"
    step.rename(step.with_name("60-look.sh"))
    lines: list[str] = []
    made = oci.build(client, inputs=tiny, base=base, tag="dray-test:tiny", on_line=lines.append)
    container = client.containers.create(made, name="dray-test-tiny")
    try:
        assert SEEN in lines
        content = b"".join(container.export())
        assert content.count(CONTROL.encode()) == 1
        assert content.count(MARK.encode()) == 0
        assert MARK not in json.dumps([client.images.get(made).attrs, client.api.history(made)])
    finally:
        container.remove(force=True)
        client.images.remove("dray-test:tiny", force=True)


@pytest.mark.docker
def test_nothing_of_the_host_stays_in_a_sif(client, base, apptainer, tiny, tmp_path):
    lines: list[str] = []
    out = tmp_path / "tiny.sif"
    with sif.replacing(out) as scratch:
        builder.build(client, checkout=ROOT, inputs=tiny, base=base, scratch=scratch, on_line=lines.append)
    assert SEEN in lines
    assert (out.stat().st_uid, out.stat().st_gid) == (os.getuid(), os.getgid())
    grep = ("grep", "-rsalF", "-e", CONTROL, "-e", MARK, "/", "--exclude-dir=proc", "--exclude-dir=sys")
    assert apptainer(out, *EXEC, *grep)[1].split() == ["/opt/dray/control"]
    assert MARK not in apptainer(out, "inspect", "--all", "/image.sif")[1]


@pytest.mark.docker
@pytest.mark.sif
def test_interrupted_build_leaves_the_old_image_and_no_container(client, base, apptainer, tmp_path):
    out = tmp_path / "my images" / "dray-cpu.sif"
    out.parent.mkdir()
    out.write_text("old")
    running = {container.id for container in client.containers.list(all=True)}
    command = [sys.executable, "-m", "dray", "image", "build", "cpu", "--base", base, "--out", out]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as build:
        assert build.stderr
        said = []
        for line in build.stderr:
            said += [line] if line.startswith("dray: step") else []
            if line == "dray: step 10-system\n":
                build.send_signal(signal.SIGINT)
        assert build.wait() == 130, said
    assert said[-1] == "dray: step 10-system\n"
    assert out.read_text() == "old"
    assert list(out.parent.iterdir()) == [out]
    left = [container for container in client.containers.list(all=True) if container.id not in running]
    assert [container.name for container in left if container.name.startswith("dray-builder-")] == []
