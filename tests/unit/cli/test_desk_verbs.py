"""`dray cluster exec -- dray VERB`: the verb runs in the image, as at a login node without Python."""

from __future__ import annotations

import subprocess
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from dray.cli import cluster as verbs
from helpers import ROOT

# Whether its standard input is still open: read(1) would end at once with 1 otherwise, and not with more than 128.
LOGIN = 'printf "%s\\n" "$@"; code=0; read -r -t 0.1 || code=$?; ((code > 128)) && echo open\n'


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (["dray", "submit", "a b.toml"], ["bash", "slurm/desk.sh", "submit", "a b.toml"]),
        (["sinfo", "dray"], ["sinfo", "dray"]),
    ],
)
def test_dray_is_the_image_s(monkeypatch: pytest.MonkeyPatch, command: list[str], argv: list[str]) -> None:
    asked: list[Any] = []

    def run(self: object, command: list[str], **_: object) -> SimpleNamespace:
        asked.extend(command)
        return SimpleNamespace(code=3)

    monkeypatch.setattr(verbs, "client", StringIO)
    monkeypatch.setattr(verbs.LocalCluster, "exec", run)
    with pytest.raises(typer.Exit) as ended:
        verbs.exec_(command)
    assert (asked, ended.value.exit_code) == (argv, 3)


def test_the_way_into_the_image(tmp_path: Path) -> None:
    home = tmp_path / "my dray"
    (home / "slurm").mkdir(parents=True)
    (home / "build").mkdir()
    (home / "slurm" / "desk.sh").write_bytes((ROOT / "slurm" / "desk.sh").read_bytes())
    (home / "slurm" / "login.sh").write_text(LOGIN)
    argv = ["bash", home / "slurm" / "desk.sh", "why", "a b"]
    missing = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stderr) == (
        78, f"dray: the image does not exist\n  wanted: {home}/build/dray-cpu.sif\n  fix:    make image-cpu\n",
    )  # fmt: skip
    (home / "build" / "dray-cpu.sif").touch()
    shown = subprocess.run(
        argv, stdin=subprocess.DEVNULL, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines() == ["/shared", f"{home}/build/dray-cpu.sif", str(tmp_path), "0", "why", "a b", "open"]
