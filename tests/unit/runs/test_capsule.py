"""`capsule.json`: what is needed to repeat a run, read in any state."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

import warm
from capsules import begun, nodes, steps
from dray.contract import hardware, run_folder
from dray.contract.findings import ConfigError
from dray.runner import records
from dray.runs import capsule
from dray.runs.capsule import Node
from dray.runs.finish import finish
from dray.runs.store import RunPaths
from helpers import PYTHON, bash_blocks, golden, section
from nodes import decoded, loopback, planned

TOKEN = "hf_" + "a1" * 12


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """An attempt that has ended."""
    paths = begun(tmp_path / "runs")
    nodes(paths)
    steps(paths, 2.0, 1.5)
    finish(paths, code=1)
    return paths


def test_the_whole_capsule(paths: RunPaths) -> None:
    """Its time is each run's own."""
    finished = json.loads(paths.capsule.read_text())["finished"]
    golden("capsule.json", paths.capsule.read_text().replace(finished, "TIME"))


def test_a_runner_tells_what_a_capsule_has(tmp_path: Path) -> None:
    records.write_node(decoded(planned(tmp_path, nodes=loopback("n1"))), {"OMP_NUM_THREADS": "3", "DRAY_CORES": "0-2"})
    told = json.loads((tmp_path / run_folder.node(0)).read_text())
    node = Node.model_validate(told)
    assert node.packages["pydantic"]
    assert (node.name, node.threads, node.cores_of_ranks, node.gpus) == ("n1", 3, "0-2", ())
    assert node.cpu
    assert node.kernel == f"Linux {os.uname().release}"
    assert set(hardware.look("rocm", {})) | {"node", "name", "packages"} == set(Node.model_fields)


def test_a_run_goes_on_where_a_node_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nodes").write_text("")
    records.write_node(decoded(planned(tmp_path)), {})
    assert "node-0.json cannot be written" in capsys.readouterr().out


def test_what_is_known_before_the_end(tmp_path: Path) -> None:
    paths = begun(tmp_path)
    made = capsule.of(paths)
    assert (made.finished, made.nodes) == (None, ())
    nodes(paths)
    assert [node.name for node in capsule.of(paths).nodes] == ["n1", "n2"]


@pytest.mark.hostile("files")
def test_a_damaged_record_of_a_node_leaves_the_others(paths: RunPaths) -> None:
    (paths.nodes / "node-1.json").write_text("{")
    assert not [warning for warning in finish(paths, code=1).warnings if "capsule" in warning]
    assert [node.name for node in capsule.read(paths).nodes] == ["n1"]


def test_another_version(paths: RunPaths) -> None:
    paths.capsule.write_text(paths.capsule.read_text().replace('"version": 1', '"version": 2', 1))
    with pytest.raises(ConfigError, match="another version of dray"):
        capsule.read(paths)


# Code of the user's own.


def git(folder: Path, *words: str) -> None:
    own = {**PYTHON, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": str(folder)}
    own |= {f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", "-C", folder, *words], env=own, check=True, capture_output=True)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A working tree with a change; its configuration names programs."""
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "train.py").write_text("lr = 1\n")
    (folder / ".gitattributes").write_text("*.py diff=odd\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=first")
    trap = folder / ".git" / "trap"
    trap.write_text(f'#!/bin/sh\ntouch "{tmp_path}/ran"\n')
    trap.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external", "diff.odd.command", "diff.odd.textconv"):
        git(folder, "config", key, str(trap))
    (folder / "train.py").write_text(f"lr = 2\ntoken = '{TOKEN}'\npassword = 'horse'\n")
    (folder / "notes.txt").write_text("mine")
    return folder


def test_code_that_git_knows(code: Path, tmp_path: Path) -> None:
    paths = begun(tmp_path, beside=code)
    made = capsule.read(paths).source
    assert made
    assert (made.folder, made.branch, made.untracked) == (str(code), "main", ("notes.txt",))
    diff = paths.source_diff.read_text()
    assert made.diff_sha256 == hashlib.sha256(diff.encode()).hexdigest()
    assert diff.endswith("-lr = 1\n+lr = 2\n+token = '[secret]'\n+password = '[secret]'\n")
    assert not (tmp_path / "ran").exists()


def test_code_as_it_was_submitted(code: Path, tmp_path: Path) -> None:
    """A job is planned in the image, which has no git."""
    paths = begun(tmp_path, beside=tmp_path)
    assert capsule.read(paths).source is None
    found = capsule.find_source(code)
    assert found
    capsule.keep_source(paths.run, found)
    finish(paths, code=1)
    assert capsule.read(paths).source == found[0]
    assert paths.source_diff.read_text() == found[1]


@pytest.mark.seconds
def test_a_large_diff_is_not_kept(code: Path) -> None:
    (code / "train.py").write_text("x = 1  # a line\n" * 100_000)
    found = capsule.find_source(code)
    assert found
    assert found[0].diff_sha256
    assert found[1] == ""


def test_code_without_a_branch_or_a_change(code: Path) -> None:
    git(code, "checkout", "--quiet", "--force", "--detach")
    found = capsule.find_source(code)
    assert found
    assert (found[0].branch, found[0].diff_sha256, found[1]) == ("HEAD", "", "")


def test_code_of_another_user_or_of_nobody(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert capsule.find_source(tmp_path) is None
    assert capsule.find_source(tmp_path / "none") is None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert capsule.find_source(code) is None


@pytest.mark.seconds
def test_the_commands_of_its_page(paths: RunPaths, tmp_path: Path) -> None:
    block = bash_blocks(section("compare.md", "# Compare runs"))
    program = warm.program(tmp_path / "bin" / "dray")
    env = {**PYTHON, "PATH": f"{program.parent}:{os.environ['PATH']}", "RUN": str(paths.run)}
    subprocess.run(["bash", "-ec", block], cwd=tmp_path, env=env, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "run.tar.gz").exists()
