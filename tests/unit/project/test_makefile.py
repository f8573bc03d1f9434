"""What `make clean` and `make clean-images` remove, and what they leave."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

KEPT = ("dray-cpu.sif", "dray-cpu.sif.json", "dray-theirs/image.json", "cluster/shared/runs/plan.json")
GONE = ("wheels/x.whl", "base/a b.tar", ".debs-x/y", "failed/cpu/rootfs/x")


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "my clone"
    for name in (*KEPT, *GONE):
        (folder / "build" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "build" / name).write_text(name)
    (folder / ".venv").mkdir()
    (folder / "runs").mkdir()
    (folder / "Makefile").write_bytes((root / "Makefile").read_bytes())
    return folder


def make(checkout: Path, *words: str, terminal: str = "") -> subprocess.CompletedProcess[str]:
    """With an answer typed at a terminal, or without one."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    argv = ["make", "--silent", "-C", str(checkout), *words]
    if not terminal:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=env)
    ours, theirs = pty.openpty()
    os.write(ours, terminal.encode())
    try:
        return subprocess.run(argv, stdin=theirs, capture_output=True, text=True, check=False, env=env)
    finally:
        os.close(ours)
        os.close(theirs)


def left(checkout: Path) -> list[str]:
    return sorted(
        path.relative_to(checkout / "build").as_posix() for path in (checkout / "build").rglob("*") if path.is_file()
    )


def test_clean_leaves_images_and_runs(checkout: Path) -> None:
    assert make(checkout, "clean").returncode == 0
    assert left(checkout) == sorted(KEPT)
    assert (checkout / "runs").exists()
    assert not (checkout / ".venv").exists()
    assert make(checkout, "clean").returncode == 0  # and again


@pytest.mark.parametrize(
    ("words", "terminal", "code", "gone"),
    [
        ([], "y\n", 0, True),
        ([], "\n", 0, False),
        ([], "n\n", 0, False),
        ([], "", 2, False),
        (["YES=1"], "", 0, True),
    ],
)
def test_clean_images_asks(checkout: Path, words: list[str], terminal: str, code: int, *, gone: bool) -> None:
    done = make(checkout, "clean-images", *words, terminal=terminal)
    assert done.returncode == code, done.stderr
    assert [line.split("\t")[1] for line in done.stdout.splitlines()[:3]] == [
        *("build/dray-cpu.sif", "build/dray-cpu.sif.json", "build/dray-theirs"),
    ]
    assert left(checkout) == sorted(KEPT[3:] + GONE if gone else KEPT + GONE)
    if code:
        assert "make clean-images YES=1" in done.stderr


def test_no_image(checkout: Path) -> None:
    make(checkout, "clean-images", "YES=1")
    assert make(checkout, "clean-images").stdout == "there is no image in build/\n"
