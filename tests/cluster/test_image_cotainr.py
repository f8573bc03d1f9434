"""cotainr itself builds an image, which trains on the cluster by plain sbatch; Miniforge alone is a stand-in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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
def build(checkout, tmp_path_factory) -> Callable[[str], Path]:
    """By the name of the variant; the second time it must be there."""
    with builder.engine() as client:
        networks = client.networks.get("bridge").attrs["IPAM"]["Config"] if client else []
    address = networks[0]["Gateway"] if networks else "127.0.0.1"
    served = tmp_path_factory.mktemp("served")

    def by_cotainr(variant: str) -> Path:
        words = ["build", variant, "--with", "cotainr", "--accept-licenses", "--wheels", checkout.parent / "wheels"]
        words += ["--miniforge", miniforge.digest()]
        with miniforge.served(served, address) as env:
            built = rocm.dray(*words, checkout=checkout, env=env)
        assert built.returncode == 0, built.stderr
        again = rocm.dray(*words, checkout=checkout)
        assert "dray: found, built from the same inputs" in again.stderr
        return checkout / "build" / f"dray-{variant}.sif"

    return by_cotainr


def test_rocm_with_the_cpu_s_wheels(build, checkout):
    """What it is made of; it cannot train, for it wants GPUs of AMD's, which this torch does not drive."""
    made = build("rocm")
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


def test_cpu_trains_on_two_nodes(build, cluster, sbatch, short, plain, losses_of):
    """The same losses as in dray's own image."""
    made, shared = build("cpu"), cluster.shared / "cotainr-test"
    shared.mkdir(exist_ok=True)
    try:
        for path in (made, record.path_for(made)):
            shutil.copy(path, shared)
        env = {"DRAY_IMAGE": f"/shared/cotainr-test/{made.name}"}
        ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", *short, env=env)
    finally:
        shutil.rmtree(shared)
    assert losses_of(ended) == plain
