"""`capsule.json`: what is needed to repeat a run, verified, packed, and read in any state."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from capsules import begun, nodes, steps
from dray.contract import hardware, run_folder
from dray.contract.findings import ConfigError, DrayError
from dray.runner import failure_record
from dray.runs import capsule, pack, source, verify
from dray.runs.capsule_schema import Node
from dray.runs.finish import finish
from dray.runs.store import RunPaths
from dray.runs.write import read
from helpers import PYTHON, ROOT, bash_blocks, golden, section

TOKEN = "hf_" + "a1" * 12


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """An attempt that has ended."""
    paths = begun(tmp_path / "runs")
    nodes(paths)
    steps(paths, 2.0, 1.5)
    finish(paths, code=1)
    return paths


def dray(*words: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dray", *words]
    return subprocess.run(
        argv,
        cwd=cwd,
        env={**PYTHON, "HOME": "/home/me", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


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
    assert (made.finished, made.nodes, made.plan.path) == (None, (), "plan.json")
    assert verify.verify(paths).same
    nodes(paths)
    assert [node.name for node in capsule.of(paths, read(paths)).nodes] == ["n1", "n2"]


def test_verify_names_each_file(paths: RunPaths) -> None:
    assert [line.split() for line in verify.verified(verify.verify(paths))][1:] == [
        ["same", name] for name in ("plan.json", "facts.txt", "metrics.jsonl", "node.sh", "result.json")
    ] + [["same", "nodes/node-0.json"], ["same", "nodes/node-1.json"]]
    paths.metrics.write_text("{}")
    paths.node_script.unlink()
    paths.facts.unlink()
    paths.facts.symlink_to("/etc/passwd")
    found = verify.verify(paths)
    states = {one.path: one.state for one in found.files}
    assert (states["metrics.jsonl"], states["node.sh"], states["facts.txt"]) == ("changed", "missing", "changed")
    assert not found.same


@pytest.mark.seconds
def test_the_commands(paths: RunPaths, tmp_path: Path) -> None:
    shown = dray("capsule", "show", paths.run)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert (
        "nodes:     n1 n2: AMD EPYC 7763, 128 CPUs, 2 NUMA nodes, 540 GB, 1 x NVIDIA H100, driver 580.65.06,"
        in shown.stdout
    )
    packed = dray("capsule", "pack", paths.run, tmp_path / "x.tar.gz")
    assert packed.returncode == 0, packed.stderr
    paths.metrics.write_text("")
    assert dray("capsule", "verify", "--json", paths.run).returncode == 1


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
    assert verify.verify(paths).same


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


# To hand on.


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


def test_a_packed_capsule_has_no_secret(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = begun(tmp_path / "runs", "pass_env=['MY_TOKEN']", beside=code)
    monkeypatch.setenv("MY_TOKEN", "correct-horse-battery")
    paths.rank_log(0).write_text("x" * 70_000 + f"\nlogged in with correct-horse-battery and {TOKEN}\n")
    steps(paths, 2.0, odd="correct-horse-battery")
    finish(paths, code=1)
    made = pack.make(paths.run, tmp_path / "x.tar.gz")
    assert made.left_out == []
    assert (tmp_path / "x.tar.gz").stat().st_mode & 0o777 == 0o600
    own = paths.secret.read_text().strip()
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        texts = {one.name.partition("/")[2]: archive.extractfile(one).read().decode() for one in archive}
    assert not [name for name, text in texts.items() if TOKEN in text or own in text or "correct-horse" in text]
    assert texts["attempt-1/logs/rank-0.log"].endswith("\nlogged in with [MY_TOKEN] and [secret]\n")
    assert "attempt-1/secret" not in texts
    with pack.opened(str(tmp_path / "x.tar.gz")) as run:
        assert run.name == "mine"
        assert verify.verify(RunPaths(run)).same
        assert read(RunPaths(run)) == read(paths)


def _archive(file: Path, *members: tuple[str, bytes | str]) -> Path:
    """With files, or with links where a text says whither."""
    with tarfile.open(file, "w:gz") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
            else:
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return file


@pytest.mark.hostile("files")
@pytest.mark.parametrize("name", ["../../escaped", "/escaped", "x/attempt-1/../../escaped", "x/attempt-1/.."])
def test_an_archive_that_would_write_elsewhere(tmp_path: Path, name: str) -> None:
    members = ((name, b"x"), ("x/attempt-1/plan.json", "/etc/passwd"))
    with (
        pytest.raises(ConfigError, match="this file is no capsule"),
        pack.opened(str(_archive(tmp_path / "a", *members))),
    ):
        pass


@pytest.mark.hostile("files")
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE])
def test_an_archive_with_a_huge_header(tmp_path: Path, kind: bytes) -> None:
    """Kilobytes, in which tarfile would read gigabytes of a header into memory."""
    header = tarfile.TarInfo("x/attempt-1/plan.json")
    header.type, header.size = kind, 0 if kind == tarfile.GNUTYPE_SPARSE else 3 << 30
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    if kind == tarfile.GNUTYPE_SPARSE:
        block[482] = 1  # more blocks of its map follow, and each says so of the next
    more = (b"\0" * 504 + b"\1" + b"\0" * 7) if kind == tarfile.GNUTYPE_SPARSE else b"\0" * 512
    block[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(block))[0]
    with gzip.open(tmp_path / "x.tar.gz", "wb", compresslevel=1) as file:
        file.write(block)
        for _ in range(64):
            file.write(more * 2048)
    tracemalloc.start()
    try:
        with (
            pytest.raises(ConfigError, match="this file is no capsule") as refused,
            pack.opened(str(tmp_path / "x.tar.gz")),
        ):
            pass
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert refused.value.details["found"] == "a header of more than 64 KiB"


@pytest.mark.hostile("files")
def test_an_archive_with_a_file_that_is_empty_space(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.tar.gz", "wb", compresslevel=1) as file:
        header = tarfile.TarInfo("x/attempt-1/plan.json")
        header.size = 200 << 20
        file.write(header.tobuf())
    with (
        pytest.raises(ConfigError, match="this file is no capsule") as refused,
        pack.opened(str(tmp_path / "x.tar.gz")),
    ):
        pass
    assert "more than 64 MiB in one" in refused.value.details["found"]


@pytest.mark.hostile("files")
@pytest.mark.parametrize("name", ["../../escaped", "..", "a/b", ""])
def test_a_packed_run_whose_name_leads_elsewhere(paths: RunPaths, tmp_path: Path, name: str) -> None:
    made = json.loads(paths.capsule.read_text())
    paths.capsule.write_text(json.dumps(made | {"run": name}))
    pack.make(paths.run, tmp_path / "x.tar.gz")
    with pack.opened(str(tmp_path / "x.tar.gz")) as run:
        assert run.name == "run"


@pytest.mark.hostile("files")
def test_an_archive_in_any_state(paths: RunPaths, tmp_path: Path) -> None:
    file = tmp_path / "x.tar.gz"
    pack.make(paths.run, file)
    whole = file.read_bytes()
    for content in (b"", b"x", whole[: len(whole) // 2], whole[:40] + b"\0" * 40 + whole[80:]):
        (tmp_path / "y").write_bytes(content)
        with pytest.raises(DrayError), pack.opened(str(tmp_path / "y")) as run:
            capsule.read(RunPaths(run))
    with pytest.raises(ConfigError, match="already exists"):
        pack.make(paths.run, file)
