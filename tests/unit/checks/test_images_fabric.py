"""The plugin for Slingshot: the build's own step compiles and loads it, where its sources are.

`make image-cuda` leaves all that it needs in build/: the sources, hwloc among Debian's packages, and Triton's headers.
CI has no way to them, so that the test of the compiler is left out there, DRAY_TEST_ALL or not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dray.config.image_definition import PLUGIN
from helpers import ROOT

SOURCES = [ROOT / "build" / "sources" / name for name in ("aws-ofi-nccl-1.19.2.tar", "libfabric-1.19.1.tar")]
HWLOC = {path.name.split("_")[0]: path for path in sorted(ROOT.glob("build/debs/*/libhwloc*.deb"))}
TRITON = sorted(ROOT.glob("build/wheels/triton-*.whl"))
THERE = all(path.is_file() for path in SOURCES) and len(HWLOC) == 2 and bool(TRITON) and bool(shutil.which("g++"))
# The functions of HIP that the plugin calls.
HIP = ("hipDriverGetVersion", "hipFree", "hipMalloc", "hipMemcpy", "hipPointerGetAttribute", "hipRuntimeGetVersion")


class Step:
    """56-fabric.sh in folders of the test's own, with apt-get and the wheels' libraries played."""

    def __init__(self, folder: Path, accelerator: str) -> None:
        self.folder, self.accelerator = folder, accelerator
        self.venv = folder / "venv"
        self.site = self.venv / "lib" / "python3.11" / "site-packages"
        shutil.copytree(ROOT / "containers" / "steps", folder / "steps")
        for path, changes in {
            "lib.sh": {"=/mnt\n": f"={folder}/mnt\n", "=/opt/dray\n": f"={self.venv}\n"},
            "56-fabric.sh": {
                "=/var/lib/dray-build\n": f"={folder}/build\n",
                "LD_LIBRARY_PATH=$BUILD/lib ": f"LD_LIBRARY_PATH=$BUILD/lib:{folder}/hwloc ",
            },
        }.items():
            text = (folder / "steps" / path).read_text()
            for old, new in changes.items():
                assert text.count(old) == 1
                text = text.replace(old, new)
            (folder / "steps" / path).write_text(text)
        for name in ("mnt/sources", "bin", "venv/bin"):
            (folder / name).mkdir(parents=True)
        (folder / "mnt" / "image.env").write_text(f"DRAY_ACCELERATOR={accelerator}\n")
        (folder / "bin" / "apt-get").write_text(f'#!/bin/bash\necho "${{@: 4}}" >>{folder}/apt\n')
        (folder / "bin" / "apt-get").chmod(0o755)
        (folder / "venv" / "bin" / "python3").symlink_to(sys.executable)

    def run(self) -> subprocess.CompletedProcess[str]:
        include = self.folder / "usr" / "include"
        env = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "CPATH": ":".join(map(str, (include, *include.glob("*-linux-gnu")))),
            "LIBRARY_PATH": str(self.folder / "hwloc"),
        }
        argv = ["bash", self.folder / "steps" / "56-fabric.sh"]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    def bring(self) -> None:
        for source in SOURCES:
            (self.folder / "mnt" / "sources" / source.name).symlink_to(source)
        for deb in HWLOC.values():
            subprocess.run(["dpkg", "--extract", deb, self.folder], check=True)
        (self.folder / "hwloc").symlink_to(next(self.folder.glob("usr/lib/*-linux-gnu")))
        with zipfile.ZipFile(TRITON[-1]) as wheel:
            headers = [name for name in wheel.namelist() if "/include/" in name]
            wheel.extractall(self.site, headers)
        self.library("nvidia/cu13/lib/libcudart.so.13", "libcudart.so.13", ())
        self.library("torch/lib/libamdhip64.so", "libamdhip64.so", HIP)

    def library(self, name: str, soname: str, functions: tuple[str, ...]) -> None:
        path = self.site / name
        path.parent.mkdir(parents=True)
        text = "".join(f"void {function}(void) {{}}\n" for function in functions)
        argv = ["gcc", "-shared", "-xc", "-", "-o", str(path), f"-Wl,-soname,{soname}"]
        subprocess.run(argv, input=text, text=True, check=True)


@pytest.mark.parametrize("accelerator", ["cpu", "cuda", "rocm"])
def test_an_image_without_the_sources_has_nothing_of_it(tmp_path: Path, accelerator: str) -> None:
    step = Step(tmp_path, accelerator)
    ended = step.run()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not [path for path in ("venv/fabric", "build", "apt") if (tmp_path / path).exists()]


@pytest.mark.slow
@pytest.mark.skipif(not THERE, reason="build/ has not the plugin's sources (make image-cuda fetches them)")
@pytest.mark.parametrize("accelerator", ["cuda", "rocm"])
def test_the_step_compiles_what_nccl_loads(tmp_path: Path, accelerator: str) -> None:
    step = Step(tmp_path, accelerator)
    step.bring()
    ended = step.run()
    assert ended.returncode == 0, ended.stderr
    plugin = step.venv / Path(PLUGIN).relative_to("/opt/dray")
    argv = ["readelf", "--wide", "--dynamic", "--version-info", plugin]
    headers = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\) .*\[(.*)\]", headers)
    own = {"cuda": [], "rocm": ["libamdhip64.so"]}[accelerator]
    found = sorted(name for name in needed if not name.startswith(("libc.", "libm.", "libgcc_s", "ld-linux")))
    assert found == sorted([*own, "libfabric.so.1", "libhwloc.so.15", "libstdc++.so.6"])
    versions_needed = {*re.findall(r"Name: (FABRIC_\S+) ", headers)}
    assert versions_needed == {"FABRIC_1.0", "FABRIC_1.1", "FABRIC_1.3"}  # of libfabric 1.9
    names = subprocess.run(["nm", "-D", "--defined-only", plugin], capture_output=True, text=True, check=True).stdout
    versions = {int(number) for number in re.findall(r" ncclNetPlugin_v(\d+)\n", names)}
    assert versions >= set(range(6, 12))
    if accelerator == "cuda":
        assert (plugin.parent / "libcudart.so").resolve() == step.site / "nvidia/cu13/lib/libcudart.so.13"
    assert not (tmp_path / "build").exists()
    assert (tmp_path / "apt").read_text().startswith("purge --yes autoconf ")
