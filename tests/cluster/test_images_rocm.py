"""The rocm image: without ROCm's wheels it says so; with others in their place the whole definition is walked."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from dray.containers import builder, docker
from dray.images.sources import inputs, lock
from helpers import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.sif]


def dray(*words: str | Path, checkout: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dray", "image", *words]
    env = {**os.environ, "DRAY_HOME": str(checkout)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_without_its_wheels_it_says_what_to_do_within_a_minute():
    """Where pip does find ROCm's wheels, this would build the image; there the test is not for."""
    there = ROOT / "build" / "dray-rocm.sif"
    before = there.exists()
    started = time.monotonic()
    refused = dray("build", "rocm", "--wheels", ROOT / "tests", checkout=ROOT)
    assert time.monotonic() - started < 60
    assert refused.returncode == 69
    vendors = sorted(inputs.image(ROOT, "rocm").vendor, key=lambda vendor: vendor.name)
    wheels = [f"{vendor.name.replace('-', '_')}-{vendor.version}-cp311-cp311-*_x86_64.whl" for vendor in vendors]
    assert f"  wanted: {wheels[0]}\n          {wheels[1]}\n" in refused.stderr
    assert "https://download.pytorch.org/whl/rocm6.4" in refused.stderr
    assert "make image-rocm WHEELS=FOLDER" in refused.stderr
    assert there.exists() is before
    assert not list(ROOT.glob("build/wheels/.new-*"))
    assert not list(ROOT.glob("build/.dray-rocm*"))


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy in which the CPU's torch, and Triton for CUDA, stand in for ROCm's."""
    copy = tmp_path / "my work"
    shutil.copytree(ROOT / "containers", copy / "containers", symlinks=True)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    pins = {pin.name: pin for pin in lock.read(ROOT / "containers" / "cpu" / "requirements.lock")}
    standing_in = {one for name in ("torch", "triton") for one in pins[name].hashes}
    folders = {True: tmp_path / "wheels", False: copy / "build" / "wheels"}
    for folder in folders.values():
        folder.mkdir(parents=True)
    # What all variants share need not be fetched again; what stands in is in the user's folder alone.
    for wheel in (ROOT / "build" / "wheels").glob("*-*"):
        if wheel.is_file():
            inputs.link(wheel, folders[hashlib.sha256(wheel.read_bytes()).hexdigest() in standing_in] / wheel.name)
    assert len(list(folders[True].iterdir())) == 2, "make image-cpu fetches these two"
    if made := builder.made_base(ROOT, "bookworm"):
        (copy / "build" / "base").mkdir()
        inputs.link(made, copy / "build" / "base" / made.name)
    folder = copy / "containers" / "rocm"
    described = (folder / "image.toml").read_text()
    for vendor, stand_in, version in (("torch", "torch", "2.13.0+cpu"), ("pytorch-triton-rocm", "triton", "3.7.1")):
        described = re.sub(
            rf'name = "{vendor}"\nversion = ".*"\nsha256 = \[".*"\]',
            f'name = "{stand_in}"\nversion = "{version}"\nsha256 = {json.dumps(list(pins[stand_in].hashes))}',
            described,
        )
    # The step of these looks for ROCm's own libraries, which no wheel here has.
    described = re.sub(r"\[\[source\]\].*?\n\n", "", described, flags=re.DOTALL)
    (folder / "image.toml").write_text(described)
    # The cpu image compiles all operators that jobs need; the smallest is enough to see that the step is walked.
    step = copy / "containers" / "steps" / "55-deepspeed.sh"
    whole = step.read_text()
    operators = " DS_BUILD_CPU_ADAM=1 DS_BUILD_AIO=1"
    assert operators in whole
    step.write_text(whole.replace(operators, " DS_BUILD_UTILS=1"))
    wanted = (folder / "requirements.in").read_text()
    (folder / "requirements.in").write_text(re.sub(r"^torch==\S+", "torch==2.13.0", wanted, flags=re.MULTILINE))
    return copy


def test_the_definition_is_walked_to_its_end_with_the_cpu_s_wheels(checkout, tmp_path):
    """No ROCm is in what comes out: this shows that the steps, the folder of wheels and the lock work."""
    locked = dray("lock", "rocm", checkout=checkout)
    assert locked.returncode == 0, locked.stderr
    stale = dray("build", "rocm", "--wheels", tmp_path / "nowhere", checkout=checkout)
    assert (stale.returncode, stale.stderr.splitlines()[-2:]) == (
        78,
        ["dray: the folder of wheels does not exist", f"  where:  {tmp_path}/nowhere"],
    )
    with closing(docker.client()) as client:
        try:
            built = dray("build", "rocm", "--format", "docker", "--wheels", tmp_path / "wheels", checkout=checkout)
            assert built.returncode == 0, built.stderr
            look = "cat /opt/dray/image.json && python3 -m dray.checks --json"
            made = client.containers.create(
                "dray:rocm", ["bash", "-c", look], name="dray-test-rocm", network_mode="none"
            )
            try:
                made.start()
                made.wait()
                said = made.logs(stdout=True, stderr=False).decode()
            finally:
                made.remove(force=True)
        finally:
            if client.images.list("dray:rocm"):
                client.images.remove("dray:rocm", force=True)
    image, end = json.JSONDecoder().raw_decode(said)
    assert (image["variant"], image["accelerator"], image["architectures"]) == ("rocm", "rocm", ["gfx90a"])
    assert image["packages"]["torch"] == "2.13.0+cpu"
    results = {one["problem"]: one for one in json.loads(said[end:])["results"]}
    # It is seen through: this torch drives no GPU of AMD's, and DeepSpeed's operator was built for one that does.
    failed = {name for name, one in results.items() if one["level"] == "error"}
    assert failed == {"device", "deepspeed utils"}
    assert "cpu" in results["device"]["found"]
