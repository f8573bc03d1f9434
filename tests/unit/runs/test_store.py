"""A run by its folder, its name or the beginning of it, a job's number, or nothing."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

from dray.cli import model
from dray.contract.findings import ConfigError
from dray.runs import store


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "my runs"
    for number, name in enumerate(
        ("20260101-120000-gpt2-41", "20260101-130000-gpt2-a1b2c3", "20260102-090000-bert-43")
    ):
        attempt = folder / name / "attempt-1"
        attempt.mkdir(parents=True)
        (attempt / "facts.txt").write_text(f"scheduler=slurm\njob={41 + number}\n")
        (attempt / "plan.json").touch()
        os.utime(attempt / "plan.json", (1000 + number, 1000 + number))
    queued = folder / "20260103-000000-queued-d4e5f6"
    queued.mkdir()
    (queued / "job.json").write_text(json.dumps({"job": 44, "time": 1.0, "argv": []}))
    os.utime(queued / "job.json", (500, 500))
    (folder / "no run").mkdir()
    return folder


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("", "20260102-090000-bert-43"),
        ("20260101-13", "20260101-130000-gpt2-a1b2c3"),
        ("20260101-120000-gpt2-41", "20260101-120000-gpt2-41"),
        ("41", "20260101-120000-gpt2-41"),
        ("44", "20260103-000000-queued-d4e5f6"),
    ],
)
def test_it_is_found(runs: Path, word: str, name: str) -> None:
    assert store.find(word, runs) == runs / name


@pytest.mark.parametrize(("word", "name"), [("20260102", "20260102-090000-bert-43"), ("2026", None)])
def test_a_date_is_no_job(runs: Path, word: str, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find a job, all attempts' facts are read; a number that begins several names may be one."""
    read = Mock(return_value=b"job=2026\n")
    monkeypatch.setattr(store.files, "read", read)
    found = store.find(word, runs)
    assert (found.name if name else read.called) == (name or True)
    assert read.called is (name is None)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["n1", "n2", "n3"], "a number from 0 to 2, or the name of a node: n1, n2, n3"),
        ([], "a number from 0 to 0, or the name of a node: "),
    ],
)
def test_a_node_that_the_run_has_not(names: list[str], wanted: str) -> None:
    assert store.node_number([*names, "n9"], "n9") == len(names)
    with pytest.raises(ConfigError, match="the run has no such node") as refused:
        store.node_number(names, "9")
    assert refused.value.finding.wanted == wanted


@pytest.mark.parametrize(
    ("verb", "words"),
    [(model.evaluate, []), (model.generate, []), (model.export, []), (model.push, ["me/my-model"])],
)
def test_verbs_of_a_model_look_in_runs(runs: Path, verb: Callable[..., None], words: list[str]) -> None:
    with pytest.raises(ConfigError, match="the run's plan is damaged"):
        verb("20260102", *words, runs=runs)


def test_what_is_written_into_a_run_later_makes_it_no_newer(runs: Path) -> None:
    """As by `dray enter`."""
    (runs / "20260101-120000-gpt2-41" / "attempt-1" / "enter.sh").touch()
    (runs / "20260103-000000-queued-d4e5f6" / "job-44.log").touch()
    newest = ["bert-43", "gpt2-a1b2c3", "gpt2-41", "queued-d4e5f6"]
    assert [run.name[16:] for run in store.newest_first(runs)] == newest


def test_a_folder_is_itself(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    for word in ("20260102-090000-bert-43", "./20260102-090000-bert-43", str(runs / "20260102-090000-bert-43")):
        assert store.find(word, runs / "elsewhere") == runs / "20260102-090000-bert-43"
    attempt = "20260102-090000-bert-43/attempt-1"
    assert store.find(attempt) == runs / attempt


@pytest.mark.parametrize(
    ("word", "problem", "found", "fix"),
    [
        ("20260101", "several runs begin with this name", "-gpt2-41, 20260101-13", "type more letters"),
        ("2026010-120000-gpt2-41", "there is no such run", "2026010", "type 20260101-120000-gpt2-41, if you mean it"),
        ("40", "there is no such run", "'40'", "dray runs lists them"),
        ("\x1b[2J", "there is no such run", r"'\x1b[2J'", "dray runs lists them"),
    ],
)  # fmt: skip
def test_what_is_unclear(runs: Path, word: str, problem: str, found: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        store.find(word, runs)
    assert refused.value.problem == problem
    assert found in str(refused.value.finding.found)
    assert refused.value.finding.fix == f"{fix}; --runs=FOLDER names another folder"


@pytest.mark.hostile("runs")
def test_a_link_hides_no_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leads nowhere, in a circle, to where this user may not look, or to a disk that is gone."""
    before = sorted(store.newest_first(runs))
    (runs / "dangling").symlink_to(runs / "nothing")
    (runs / "circle").symlink_to(runs / "circle")
    assert sorted(store.newest_first(runs)) == before
    failing = [Mock(path=str(runs / "closed"))]
    for error in (errno.EACCES, errno.ESTALE):
        failing[0].is_dir.side_effect = OSError(error, os.strerror(error))
        scanned = MagicMock()
        scanned.__enter__.return_value = [*failing, *os.scandir(runs)]
        with monkeypatch.context() as patched:
            patched.setattr(store.os, "scandir", lambda _folder, scanned=scanned: scanned)
            assert sorted(store.newest_first(runs)) == before


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no runs"):
        store.find("", tmp_path)
