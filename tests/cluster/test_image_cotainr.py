"""cotainr itself builds an image, which trains on the cluster by plain sbatch; Miniforge alone is a stand-in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import miniforge
import rocm
from dray.containers import builder
from dray.images.sif import record
from dray.images.sources import wheels

pytestmark = [pytest.mark.cluster, pytest.mark.sif]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    pytest.importorskip("cotainr", reason="cotainr is not installed (make .venv/cotainr)")
    copy = rocm.checkout(tmp_path_factory.mktemp("rocm"))
    locked = rocm.dray("lock", "rocm", checkout=copy)
    assert locked.returncode == 0, locked.stderr
    # It is built before the way out ends at the stand-in.
    wheels.own(checkout=copy, folder=copy / "build" / "wheels" / "dray")
    return copy


@pytest.fixture(scope="module")
def made(checkout, cluster, tmp_path_factory) -> Iterator[Path]:
    """The image, in the folder that all nodes see."""
    with builder.engine() as client:
        networks = client.networks.get("bridge").attrs["IPAM"]["Config"] if client else []
    address = networks[0]["Gateway"] if networks else "127.0.0.1"
    words = ["build", "rocm", "--with", "cotainr", "--accept-licenses", "--wheels", checkout.parent / "wheels"]
    with miniforge.served(tmp_path_factory.mktemp("served"), address) as env:
        built = rocm.dray(*words, "--miniforge", miniforge.digest(), checkout=checkout, env=env)
    assert built.returncode == 0, built.stderr
    shared = cluster.shared / "cotainr-test"
    shared.mkdir(exist_ok=True)
    for name in ("dray-rocm.sif", "dray-rocm.sif.json"):
        shutil.copy(checkout / "build" / name, shared)
    try:
        yield shared / "dray-rocm.sif"
    finally:
        shutil.rmtree(shared)


def test_it_says_what_it_is_made_of(made, checkout):
    found = record.read(made)
    assert found is not None
    assert found.tools["cotainr"] == "2025.7.1"
    assert found.tools["miniforge"] == miniforge.digest()
    verified = rocm.dray("verify", made, "--no-signature", checkout=checkout)
    assert verified.returncode == 0, verified.stderr
    looked = rocm.dray("inspect", made, checkout=checkout)
    assert looked.returncode == 0, looked.stderr
    assert "2.13.0+cpu" in looked.stdout
    bom = json.loads(rocm.dray("sbom", made, checkout=checkout).stdout)
    purls = {part["purl"].partition("?")[0] for part in bom["components"]}
    assert {"pkg:conda/python@3.11.2", "pkg:pypi/torch@2.13.0%2Bcpu", "pkg:pypi/dray@0.1.0"} <= purls
    again = rocm.dray(
        *("build", "rocm", "--with", "cotainr", "--accept-licenses", "--miniforge", miniforge.digest()),
        *("--wheels", checkout.parent / "wheels"), checkout=checkout,
    )  # fmt: skip
    assert "dray: found, built from the same inputs" in again.stderr


def test_it_trains_on_two_nodes(made, sbatch, short):
    """With the variant's name and CPUs: GPUs of AMD's are what is missing here."""
    env = {"DRAY_IMAGE": "/shared/cotainr-test/dray-rocm.sif"}
    ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", "image=rocm", *short, env=env)
    assert ended.code == 0, ended.output
    assert ended.metrics("start")[0]["hosts"] == ["n1", "n1", "n2", "n2"]
    steps = [step["loss"] for step in ended.metrics("step")]
    assert steps[-1] < steps[0]
    where = "import os, sys, torch; print(sys.prefix, os.path.realpath(torch.__file__), torch.__version__)"
    ended = sbatch("slurm/multinode.sh", "image=rocm", "preflight.when=never", "--", "python3", "-c", where, env=env)
    assert "/opt/dray/lib/python3.11/site-packages/torch/__init__.py 2.13.0+cpu" in ended.output
