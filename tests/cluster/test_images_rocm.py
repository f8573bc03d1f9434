"""The rocm image: without ROCm's wheels it says so; with others in their place the whole definition is walked."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path

import pytest

import rocm
from dray.clients import docker
from dray.images import inputs
from helpers import ROOT
from rocm import dray

pytestmark = [pytest.mark.docker, pytest.mark.sif]


def test_without_its_wheels_it_says_what_to_do_within_a_minute(tmp_path):
    """Where pip does find ROCm's wheels, this would build the image; there the test is not for."""
    copy = rocm.copied(tmp_path)
    started = time.monotonic()
    refused = dray("build", "rocm", "--wheels", ROOT / "tests", checkout=copy)
    assert time.monotonic() - started < 60
    assert refused.returncode == 69
    vendors = sorted(inputs.image(copy, "rocm").vendor, key=lambda vendor: vendor.name)
    wheels = [f"{vendor.name.replace('-', '_')}-{vendor.version}-cp311-cp311-*_x86_64.whl" for vendor in vendors]
    assert f"  wanted: {wheels[0]}\n          {wheels[1]}\n" in refused.stderr
    assert "https://download.pytorch.org/whl/rocm7.1" in refused.stderr
    assert "make image-rocm WHEELS=FOLDER" in refused.stderr
    assert not list(copy.glob("build/wheels/.new-*"))
    assert not list(copy.glob("build/*dray-rocm*"))


@pytest.fixture
def checkout(tmp_path) -> Path:
    return rocm.checkout(tmp_path)


@pytest.mark.slow
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
