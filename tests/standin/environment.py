"""The stand-in GPU's Python and its environment variables, made once and kept under build/standin."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "standin"
PACKAGES = (
    "torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "accelerate==1.15.0", "numpy", "pyarrow", "peft",
    "setuptools<82",
)  # fmt: skip


def python() -> str:
    """DRAY_STANDIN_PYTHON, whose torch is a CUDA build; else one is made here, which downloads 4 GB once."""
    if named := os.environ.get("DRAY_STANDIN_PYTHON"):
        return named
    made, done = FOLDER / "venv" / "bin" / "python", FOLDER / "venv" / "done"
    if done.exists():
        return str(made)
    base = shutil.which("python3.12") or shutil.which("python3.11")
    if base is None:
        pytest.skip("Python 3.12 or 3.11 is not here, and DRAY_STANDIN_PYTHON is not set")
    subprocess.run([base, "-m", "venv", "--clear", FOLDER / "venv"], check=True)
    subprocess.run([made, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    done.touch()
    return str(made)


def environment(devices: int = 1) -> tuple[str, dict[str, str]]:
    """Its Python, and what a process has to see; builds the libraries."""
    if lacking := [tool for tool in ("gcc", "g++", "nm") if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(lacking)}: the stand-in GPU cannot be built")
    chosen = python()
    subprocess.run([HERE / "build.sh", chosen, FOLDER / "gpu"], check=True)
    words = subprocess.run(
        ["bash", "-c", '. "$1" && env -0', "env", FOLDER / "gpu" / "env.sh"],
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    env = dict(word.split("=", 1) for word in words.stdout.split("\0") if word)
    env |= {"HOME": str(FOLDER), "STANDIN_DEVICES": str(devices), "PYTHONPATH": f"{HERE / 'hook'}:{ROOT / 'src'}"}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "inductor"), "TRITON_CACHE_DIR": str(FOLDER / "triton")}
    return chosen, env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
