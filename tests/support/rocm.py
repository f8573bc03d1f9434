"""Copies of this checkout to build rocm in: as it is, and with the CPU's wheels in place of ROCm's."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dray.clients import builder
from dray.images import bundle
from dray.images.locks import lock
from helpers import ROOT


def dray(*words: str | Path, checkout: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`dray image` in it."""
    argv = [sys.executable, "-m", "dray", "image", *words]
    given = {**os.environ, "DRAY_HOME": str(checkout), **(env or {})}
    return subprocess.run(argv, env=given, capture_output=True, text=True, check=False)


def copied(tmp_path) -> Path:
    """Its size is not known: this machine need not have 30 GB free."""
    copy = tmp_path / "my work"
    shutil.copytree(ROOT / "containers", copy / "containers", symlinks=True)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    about = copy / "containers" / "rocm" / "image.toml"
    about.write_text(re.sub(r"^\[size\]\n([^\n[].*\n)*", "", about.read_text(), flags=re.MULTILINE))
    return copy


def checkout(tmp_path) -> Path:
    """The CPU's torch, and Triton for CUDA, are in `wheels` beside it, as ROCm's would be in a user's folder."""
    copy = copied(tmp_path)
    pins = {pin.name: pin for pin in lock.read(ROOT / "containers" / "cpu" / "requirements.lock")}
    standing_in = {one for name in ("torch", "triton") for one in pins[name].hashes}
    folders = {True: tmp_path / "wheels", False: copy / "build" / "wheels"}
    for folder in folders.values():
        folder.mkdir(parents=True)
    # What all variants share need not be fetched again; what stands in is in the user's folder alone.
    for wheel in (ROOT / "build" / "wheels").glob("*-*"):
        if wheel.is_file():
            bundle.link(wheel, folders[hashlib.sha256(wheel.read_bytes()).hexdigest() in standing_in] / wheel.name)
    assert len(list(folders[True].iterdir())) == 2, "make image-cpu fetches these two"
    if (ROOT / "build" / "debs").is_dir():
        shutil.copytree(ROOT / "build" / "debs", copy / "build" / "debs", copy_function=bundle.link)
    if made := builder.made_base(ROOT, "bookworm"):
        (copy / "build" / "base").mkdir()
        bundle.link(made, copy / "build" / "base" / made.name)
    folder = copy / "containers" / "rocm"
    described = (folder / "image.toml").read_text()
    for vendor, stand_in, version in (("torch", "torch", "2.13.0+cpu"), ("triton-rocm", "triton", "3.7.1")):
        described, replaced = re.subn(
            rf'name = "{vendor}"\nversion = ".*"\nsha256 = \[[^]]*\]',
            rf'name = "{stand_in}"\nversion = "{version}"\nsha256 = {json.dumps(list(pins[stand_in].hashes))}',
            described,
        )
        assert replaced == 1
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
