"""environment.yml of each variant is what its lock gives, and `make image-VARIANT-cotainr` hands it to cotainr."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import yaml

from dray.config.image_definition import Image, Vendor
from dray.contract.findings import ConfigError
from dray.images import inputs
from dray.images.locks import conda, lock
from helpers import ROOT

INDEX = "https://vendor.invalid/whl/rocm7.1"


def image() -> Image:
    named = {"torch": ("2.10.0+rocm7.1", ["a" * 64, "b" * 64]), "triton-rocm": ("3.6.0", ["c" * 64])}
    vendors = [
        Vendor(name=name, version=version, sha256=hashes, index=INDEX) for name, (version, hashes) in named.items()
    ]
    return Image(variant="rocm", base=f"debian@sha256:{'0' * 64}", python="3.11", vendor=vendors)


def pins() -> list[lock.Pin]:
    return [
        lock.Pin("deepspeed", "0.19.8", ("d" * 64,)),
        lock.Pin("numpy", "2.4.6", ("e" * 64, "f" * 64)),
        lock.Pin("torch", "2.10.0", ("a" * 64, "b" * 64)),
    ]


def test_the_whole_file():
    assert conda.text(image(), pins()) == (
        f"""\
# `dray image lock rocm` writes this file: the packages of requirements.lock, for cotainr or Conda.
#   cotainr build x.sif --system=SYSTEM --conda-env=containers/rocm/environment.yml
# dray is not in it: `dray image adopt x.sif` puts dray beside the image.
name: dray-rocm
channels:
  - conda-forge
  - nodefaults
dependencies:
  - python=3.11
  - pip
  - pip:
      - --require-hashes
      - "--only-binary :all:"
      - --extra-index-url {INDEX}
      # DeepSpeed, for zero1 to zero3, has no wheel. If you need it, uncomment the next three lines: pip builds it by a
      # setuptools without a hash, and without operators. A job compiles those that it uses, by the image's compiler.
      # - --no-binary deepspeed
      # - deepspeed==0.19.8
      #   --hash=sha256:{"d" * 64}
      - numpy==2.4.6
        --hash=sha256:{"e" * 64}
        --hash=sha256:{"f" * 64}
      - torch==2.10.0+rocm7.1
        --hash=sha256:{"a" * 64}
        --hash=sha256:{"b" * 64}
"""
    )


def test_uncommented_lines_are_read_too():
    text = conda.text(image(), pins())
    for line in text.splitlines():
        if line.startswith("      # ") and ("deepspeed" in line or "dddd" in line):
            text = text.replace(line, line.replace("# ", "", 1))
    (asked,) = (part["pip"] for part in yaml.safe_load(text)["dependencies"] if isinstance(part, dict))
    assert asked[3:5] == ["--no-binary deepspeed", f"deepspeed==0.19.8 --hash=sha256:{'d' * 64}"]


@pytest.mark.parametrize("variant", sorted(path.parent.name for path in ROOT.glob("containers/*/requirements.lock")))
def test_each_variant_has_what_its_lock_gives(variant):
    described = inputs.image(ROOT, variant)
    packages = lock.read(ROOT / "containers" / variant / "requirements.lock")
    text = conda.path(ROOT, variant).read_text(encoding="utf-8")
    assert text == conda.text(described, packages), f"dray image lock {variant}"
    read = yaml.safe_load(text)
    *by_conda, pip = read.pop("dependencies")
    assert read == {"name": f"dray-{variant}", "channels": ["conda-forge", "nodefaults"]}
    assert by_conda == [f"python={described.python}", "pip"]
    versions = {vendor.name: vendor.version for vendor in described.vendor}
    assert [line for line in pip["pip"] if not line.startswith("--")] == [
        " ".join(
            (f"{pin.name}=={versions.get(pin.name, pin.version)}", *(f"--hash=sha256:{one}" for one in pin.hashes))
        )
        for pin in packages
        if pin.name != "deepspeed"
    ]
    assert {line for line in pip["pip"] if line.startswith("--")} == {
        *("--require-hashes", "--only-binary :all:"),
        *(f"--extra-index-url {vendor.index}" for vendor in described.vendor),
    }


def test_a_file_that_is_not_what_the_lock_gives_is_refused_and_written(tmp_path):
    described = inputs.image(ROOT, "cpu")
    shutil.copytree(ROOT / "containers" / "cpu", tmp_path / "containers" / "cpu", symlinks=True)
    conda.update(tmp_path, described, check=True)
    assert conda.update(tmp_path, described) == []
    file = conda.path(tmp_path, "cpu")
    for spoil in (lambda: file.write_text(file.read_text() + "\n"), file.unlink):
        spoil()
        with pytest.raises(ConfigError) as refused:
            conda.update(tmp_path, described, check=True)
        assert str(refused.value) == (
            f"the conda file differs from the lock\n  where:  {file}\n  fix:    dray image lock cpu"
        )
        assert conda.update(tmp_path, described) == ["environment.yml: written anew"]
        conda.update(tmp_path, described, check=True)


@pytest.mark.parametrize(
    ("settings", "base", "licences"),
    [
        ([], "docker://debian@sha256:", ""),
        (["BASE=my base.sif", "ACCEPT_LICENSES=1"], 'my base.sif"', "--accept-licenses"),
    ],
)
def test_make_calls_cotainr(settings, base, licences):
    argv = ["make", "--dry-run", "image-rocm-cotainr", *settings]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    (called,) = (line for line in done.stdout.replace("\\\n", "").splitlines() if " build " in line)
    assert called.startswith(f'.venv/bin/cotainr build build/cotainr-rocm.sif --base-image="{base}')
    assert called.rstrip().endswith(f"--conda-env=containers/rocm/environment.yml {licences}".rstrip())
