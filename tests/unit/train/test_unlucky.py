"""Unlucky surroundings: no home, no folder, no streams, names in no encoding, and what nobody expected."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dray.contract import exit_codes, failures
from dray.contract.findings import ConfigError
from helpers import PYTHON, ROOT

PLAN = [sys.executable, "-m", "dray", "plan", str(ROOT / "recipes" / "smoke-cpu.toml")]


def dray(command: str, **kwargs) -> subprocess.CompletedProcess[str]:
    """A shell's command, in which $PLAN plans the smoke test."""
    env = {**os.environ, "DRAY_RUNS": "/nonexistent/runs"} | kwargs.pop("env", {})
    command = command.replace("${PLAN% *}", shlex.join(PLAN[:-1])).replace("$PLAN", shlex.join(PLAN))
    return subprocess.run(
        ["bash", "-c", command],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        **kwargs,
    )


@pytest.mark.hostile("streams")
@pytest.mark.parametrize(
    ("command", "code", "err"),
    [
        (
            "$PLAN >/dev/full",
            69,
            "dray: the output could not be written\n  where:  standard output\n  found:  No space left on device\n",
        ),
        ("$PLAN >&-", 0, ""),
        ("$PLAN 2>&- >/dev/null", 0, ""),
        ("$PLAN <&- >/dev/null", 0, ""),
        ("$PLAN >&- 2>&- <&-", 0, ""),
        ("$PLAN nodes=0 2>/dev/full", 78, ""),
        ("$PLAN nodes=0 2>&-", 78, ""),
        ("set -o pipefail; $PLAN | head -c 1 >/dev/null", 0, ""),
        ("PYTHONIOENCODING=ascii $PLAN >/dev/null", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full(command: str, code: int, err: str) -> None:
    ended = dray(command)
    assert (ended.returncode, ended.stderr) == (code, err)


@pytest.mark.hostile("surroundings")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mkdir gone; cd gone; rmdir ../gone; $PLAN", "dray: the working folder is gone\n"),
        (r"$PLAN $'about=\xff'", "dray: a name is not UTF-8 text\n  where:  argument 3\n"),
        (r"mkdir $'\xe9'; cd $'\xe9'; $PLAN", "dray: a name is not UTF-8 text\n  where:  the working folder\n"),
        (r"DRAY_RUNS=$'/\xe9' $PLAN", "dray: a name is not UTF-8 text\n  where:  DRAY_RUNS\n"),
        (r"HOME=$'/\xe9' $PLAN", "dray: a name is not UTF-8 text\n  where:  HOME\n"),
    ],
)
def test_surroundings_that_no_run_can_have(command: str, said: str, tmp_path: Path) -> None:
    ended = dray(command, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr[: len(said)]) == (78, "", said)


@pytest.mark.hostile("surroundings")
@pytest.mark.parametrize("arguments", [["plan", PLAN[-1]], ["site", "list"]], ids=" ".join)
def test_without_a_home_and_without_a_name(arguments: list[str]) -> None:
    """A container may run with any user id, which its passwd does not have."""
    code = (
        "import os, pwd, sys\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "[os.environ.pop(name, None) for name in ('HOME', 'XDG_CONFIG_HOME', 'DRAY_SITES')]\n"
        "from dray.cli import main\n"
        "main()"
    )
    ended = subprocess.run([sys.executable, "-c", code, *arguments], check=False, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.hostile("surroundings")
def test_a_variable_in_another_encoding() -> None:
    ended = dray(r"LS_COLORS=$'\xe9' NCCL_X=$'\xe9' $PLAN --site generic >/dev/null")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.hostile("defects")
def test_a_defect_is_one_finding_and_a_file(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(failures.TRACEBACK, raising=False)
    with pytest.raises(KeyError) as caught:
        {}["a\ud800 hf_abcdefghijklmnopqrstuvwxyz"]
    if raised := caught.value:
        error = failures.unexpected_error(raised)
        (report,) = tmp_path.iterdir()
        assert error.problem == failures.DEFECT
        assert error.finding.fix == f"report it where you got dray, with {report}"
        assert error.finding.code == exit_codes.FAILED
        assert "abcdefghijklmnopqrstuvwxyz" not in str(error)
        assert report.stat().st_mode & 0o777 == 0o600
        assert "Traceback" in report.read_text()
        monkeypatch.setenv(failures.TRACEBACK, "1")
        assert failures.unexpected_error(raised).finding.fix.endswith("with the traceback above")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.hostile("defects")
@pytest.mark.parametrize(
    ("raised", "code", "problem", "where"),
    [
        (OSError(28, "x", "/runs/a"), 69, "No space left on device", "/runs/a"),
        (OSError(108, "x", "/scratch/a"), 69, "Cannot send after transport endpoint shutdown", "/scratch/a"),
        (PermissionError(13, "x", "/runs"), 78, "Permission denied", "/runs"),
        (RuntimeError("Error while serializing: I/O error: x (os error 28)"), 69, "No space left on device", ""),
        (ConfigError("mine", where="here"), 78, "mine", "here"),
    ],
)
def test_what_the_machine_refuses_is_no_defect(raised, code: int, problem: str, where: str) -> None:
    found = failures.unexpected_error(raised).finding
    assert (found.code, found.problem, found.where) == (code, problem, where)
    full = problem.startswith("No space")
    assert found.fix.startswith("make room on that disk" if full else "if the cause" if problem != "mine" else "")


def test_the_place_is_one_of_dray_s_own_lines() -> None:
    """A checkout is called dray too, and has the libraries in its .venv."""
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", "/home/me/dray/.venv/lib/library.py", "exec"), {})
    assert "library.py" not in failures.unexpected_error(caught.value).finding.where


@pytest.mark.hostile("disks")
@pytest.mark.parametrize("words", ["recipe new my.toml", "site new here", "init new"])
def test_what_cannot_be_written_whole_is_not_left(words: str, tmp_path: Path) -> None:
    """A site file that is half there would stop every command after this one."""
    line = f'ulimit -f 0; exec "{sys.executable}" -m dray {words}'
    env = {**PYTHON, "HOME": str(tmp_path), "DRAY_HOME": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (78, "")
    assert "File too large" in ended.stderr
    assert "  fix:    " in ended.stderr
    assert not list(tmp_path.rglob("*.toml"))


@pytest.mark.hostile("trainer")
def test_a_gpu_that_is_full_is_no_defect() -> None:
    """torch's own class, by its name: to import torch takes seconds."""
    text = "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 14.57 GiB"
    code = (
        "from dray.train.errors import guarded\n"
        "class OutOfMemoryError(RuntimeError): pass\n"
        f"def main(): raise OutOfMemoryError({text!r})\n"
        "guarded(main)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        f"the GPU has no memory left\n  found:  {text}\n"
        "  fix:    batch.per_device smaller, train.activation_checkpointing = true, or more GPUs with fsdp or zero3\n"
    )


@pytest.mark.hostile("trainer")
def test_the_end_of_another_rank_is_no_defect() -> None:
    text = "[pair.cc:553] Connection closed by peer [172.18.0.3]:21141. This is typically caused by a remote worker"
    code = f"from dray.train.errors import guarded\ndef main(): raise RuntimeError({text!r})\nguarded(main)"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        f"another rank has ended, and this rank cannot go on without it\n  found:  {text}\n"
        "  fix:    dray why RUN shows the first failure; if no rank failed, check the network between the nodes\n"
    )


@pytest.mark.hostile("runner")
def test_a_plan_that_no_runner_reads(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"world": {}}')
    argv = [sys.executable, "-m", "dray.runner", tmp_path / "plan.json"]
    ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == exit_codes.CONFIG
    assert ended.stderr.startswith("the plan")


@pytest.mark.slow
@pytest.mark.hostile("trainer")
@pytest.mark.torch
def test_a_model_that_cannot_be_written_is_a_finding(tmp_path: Path) -> None:
    code = (
        "import resource, signal, torch; from safetensors.torch import save_file\n"
        "from dray.train.errors import guarded\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"  # what a quota looks like
        f"guarded(lambda: save_file({{'a': torch.zeros(9999)}}, {str(tmp_path / 'model.safetensors')!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in ended.stderr
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (69, "File too large")
    assert "dray-defect" not in ended.stderr  # the folder for files goes with the run
