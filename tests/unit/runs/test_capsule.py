"""`capsule.json`: what is needed to repeat a run, verified, packed, and read in any state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from capsules import begun, nodes, steps
from dray.contract import hardware, run_folder
from dray.contract.findings import ConfigError
from dray.runner import failure_record
from dray.runs import capsule, source
from dray.runs.capsule import Node
from dray.runs.finish import finish
from dray.runs.store import RunPaths
from dray.runs.store import plan_of as read
from helpers import PYTHON, bash_blocks, golden, section

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
    """Times and digests of what has times in it are each run's own."""
    made = json.loads(paths.capsule.read_text())
    text = paths.capsule.read_text().replace(str(paths.run.parent), "/runs").replace(made["planned"], "TIME")
    text = text.replace(made["finished"], "TIME").replace(made["dray"], "VERSION")
    for file in made["files"]:
        text = text.replace(file["sha256"], "0" * 64).replace(f'"size": {file["size"]}\n', '"size": 1\n')
    golden("capsule.json", text)


def test_a_runner_tells_what_a_capsule_has(tmp_path: Path) -> None:
    plan = {"folder": str(tmp_path), "variant": "cpu", "world": {"nodes": [{"name": "n1"}]}}
    failure_record.this_node(plan, 0, {"OMP_NUM_THREADS": "3", "DRAY_CORES": "0-2"})
    told = json.loads((tmp_path / run_folder.node(0)).read_text())
    packages = told.pop("packages")
    node = Node.model_validate(told)
    assert packages["pydantic"]
    assert (node.name, node.threads, node.cores_of_ranks, node.gpus) == ("n1", 3, "0-2", ())
    assert node.cpu
    assert node.kernel == f"Linux {os.uname().release}"
    assert set(hardware.look("rocm", {})) | {"node", "name"} == set(Node.model_fields)


def test_a_run_goes_on_where_a_node_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nodes").write_text("")
    failure_record.this_node({"folder": str(tmp_path), "variant": "cpu", "world": {"nodes": [{"name": "n1"}]}}, 0, {})
    assert "node-0.json cannot be written" in capsys.readouterr().err


def test_what_is_known_before_the_end(tmp_path: Path) -> None:
    paths = begun(tmp_path)
    made = capsule.of(paths, read(paths))
    assert (made.finished, made.nodes, made.files[0].path) == (None, (), "plan.json")
    assert same(paths)
    nodes(paths)
    assert [node.name for node in capsule.of(paths, read(paths)).nodes] == ["n1", "n2"]


def same(paths: RunPaths) -> bool:
    return {file.state for file in capsule.verify(paths)} == {"same"}


def test_verify_names_each_file(paths: RunPaths) -> None:
    assert [file.path for file in capsule.verify(paths)] == [
        "plan.json", "facts.txt", "metrics.jsonl", "node.sh", "result.json", "nodes/node-0.json", "nodes/node-1.json",
    ]  # fmt: skip
    assert same(paths)
    paths.metrics.write_text("{}")
    paths.node_script.unlink()
    paths.facts.unlink()
    paths.facts.symlink_to("/etc/passwd")
    states = {file.path: file.state for file in capsule.verify(paths)}
    assert (states["metrics.jsonl"], states["node.sh"], states["facts.txt"]) == ("changed", "missing", "changed")


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
    (folder / ".gitattributes").write_text("*.py diff=odd filter=odd\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=first")
    trap = folder / ".git" / "trap"
    trap.write_text(f'#!/bin/sh\ntouch "{tmp_path}/ran"\n')
    trap.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external", "diff.odd.command", "diff.odd.textconv", "filter.odd.clean"):
        git(folder, "config", key, str(trap))
    (folder / "train.py").write_text(f"lr = 2\ntoken = '{TOKEN}'\npassword = 'horse'\n")
    (folder / "notes.txt").write_text("mine")
    return folder


def test_code_that_git_knows(code: Path, tmp_path: Path) -> None:
    paths = begun(tmp_path, beside=code)
    made = capsule.read(paths).source
    assert made
    assert (made.folder, made.branch, made.changed, made.cut, made.untracked) == (
        str(code), "main", True, False, ("notes.txt",),
    )  # fmt: skip
    diff = paths.source_diff.read_text()
    assert diff.endswith("-lr = 1\n+lr = 2\n+token = '[secret]'\n+password = '[secret]'\n")
    assert not (tmp_path / "ran").exists()
    assert "source.diff" in [one.path for one in capsule.read(paths).files]


def test_code_as_it_was_submitted(code: Path, tmp_path: Path) -> None:
    """A job is planned in the image, which has no git."""
    paths = begun(tmp_path, beside=tmp_path)
    assert capsule.read(paths).source is None
    found = source.look(code)
    assert found
    source.keep(paths.run, found)
    finish(paths, code=1)
    assert capsule.read(paths).source == found[0]
    assert paths.source_diff.read_text() == found[1]
    assert same(paths)


@pytest.mark.seconds
def test_a_large_diff_is_cut(code: Path) -> None:
    (code / "train.py").write_text("x = 1  # a line\n" * 100_000)
    found = source.look(code)
    assert found
    assert found[0].cut
    assert source.LIMIT - 20 < len(found[1]) <= source.LIMIT
    assert found[1].endswith("+x = 1  # a line\n")


def test_code_of_another_user_or_of_nobody(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source.look(tmp_path) is None
    assert source.look(tmp_path / "none") is None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert source.look(code) is None


@pytest.mark.seconds
def test_the_commands_of_its_page(paths: RunPaths, tmp_path: Path) -> None:
    block = bash_blocks(section("compare.md", "# Compare runs"))
    program = tmp_path / "bin" / "dray"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dray "$@"\n')
    program.chmod(0o755)
    env = {**PYTHON, "PATH": f"{program.parent}:{os.environ['PATH']}", "RUN": str(paths.run)}
    subprocess.run(["bash", "-ec", block], cwd=tmp_path, env=env, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "capsule.tar.gz").exists()
