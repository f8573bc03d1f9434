"""One run at a time in a checkpoint folder: what is taken over, at once or after a watch, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.contract.findings import ConfigError
from dray.train.checkpoint import lease
from dray.train.checkpoint.lease import NAME, Lease
from leases import Other, about

pytestmark = pytest.mark.hostile("checkpoints")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    monkeypatch.setattr(lease, "WATCH_S", 0.6)
    monkeypatch.setenv("NODE", "node-1")


def holding(at: Path, **other: Any) -> Lease:
    return Lease(at, SimpleNamespace(**about(**other)))  # type: ignore[arg-type]


def elsewhere(folder: Path, **other: Any) -> None:
    """As if another machine had it: nobody here sees whether that process is alive."""
    found = json.loads((folder / NAME).read_text()) | other
    found["process"][0] = "another start of the kernel"
    (folder / NAME).write_text(json.dumps(found))


def test_the_second_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with Other(tmp_path, job=4711, run_folder="/runs/the first", attempt=2) as first:
        since = json.loads((tmp_path / NAME).read_text())["since"]
        with pytest.raises(ConfigError) as refused:
            holding(tmp_path, job=4712, run_folder="/runs/second").acquire()
        assert str(refused.value) == (
            "another run uses this checkpoint folder\n"
            f"  where:  {tmp_path}\n  wanted: one run at a time\n"
            f"  found:  job 4711 on node-1, run /runs/the first, attempt 2, since {since}\n"
            "  fix:    checkpoint.folder=ANOTHER; or end that run (dray stop '/runs/the first'), then run the same "
            "command again"
        )
        assert refused.value.finding.code == 78
        assert first.ended() == "released"
    assert not list(tmp_path.iterdir())
    holding(tmp_path).acquire()


def test_without_slurm_the_process_is_named(tmp_path: Path) -> None:
    with Other(tmp_path) as first, pytest.raises(ConfigError) as refused:
        holding(tmp_path, run_folder="/runs/other").acquire()
    assert refused.value.finding.found.startswith(f"process {first.process.pid} on ")
    assert f"end process {first.process.pid} on node-1" in refused.value.finding.fix


def test_a_process_that_was_killed_is_taken_over_from_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    with Other(tmp_path, job=1) as first:
        monkeypatch.setattr(lease, "WATCH_S", 60.0)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        began = time.monotonic()
        holding(tmp_path, job=2, run_folder="/runs/other").acquire()
        assert time.monotonic() - began < 30
    assert capsys.readouterr().out.endswith(": its process has ended\n")


@pytest.mark.parametrize(
    ("before", "then"),
    [
        ({"job": 7, "attempt": 1}, {"job": 7, "attempt": 2}),  # requeued
        ({"job": 7, "attempt": 1}, {"job": 7, "attempt": 1}),  # restarted by the runners
        ({"job": 0, "attempt": 3}, {"job": 0, "attempt": 3}),
    ],
)
def test_a_run_that_starts_again_does_not_wait_for_itself(tmp_path: Path, before: dict, then: dict, capsys) -> None:
    with Other(tmp_path, **before) as first:
        elsewhere(tmp_path)
        os.kill(first.process.pid, signal.SIGKILL)
        holding(tmp_path, **then).acquire()
    assert capsys.readouterr().out.endswith(": an earlier start of this run held it\n")


def test_a_follow_on_job_whose_run_left_its_result(tmp_path: Path, capsys) -> None:
    run = tmp_path / "runs/one"
    (run / "attempt-1").mkdir(parents=True)
    with Other(tmp_path, job=7, run_folder=str(run)) as first:
        elsewhere(tmp_path)
        os.kill(first.process.pid, signal.SIGKILL)
        (run / "attempt-1/result.json").write_text("{}")
        holding(tmp_path, job=8, run_folder=str(run), attempt=2).acquire()
    assert capsys.readouterr().out.endswith(": its attempt has ended\n")


@pytest.mark.parametrize("its_own", [True, False])
def test_one_whose_job_slurm_knows_no_more(tmp_path: Path, its_own: bool, capsys) -> None:
    """The batch script has asked, and has written down whose lease it is."""
    attempt = tmp_path / "attempt-1"
    attempt.mkdir()
    with Other(tmp_path, job=7) as first:
        elsewhere(tmp_path)
        os.kill(first.process.pid, signal.SIGKILL)
        token = json.loads((tmp_path / NAME).read_text())["token"]
        (attempt / "ended").write_text(f"{token if its_own else '0' * 32}\n")
        holding(tmp_path, job=8, run_folder="/runs/other", folder=str(attempt)).acquire()
    why = "Slurm no longer knows its job" if its_own else "no sign of life for 1 s"
    assert capsys.readouterr().out.endswith(f": {why}\n")


@pytest.mark.parametrize("text", [None, "", '{"token": 1}'])
def test_what_shows_no_sign_of_life_is_taken_over(tmp_path: Path, text: str | None, capsys) -> None:
    with Other(tmp_path, job=7, run_folder="/runs/other") as first:
        elsewhere(tmp_path)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    if text is not None:
        (tmp_path / NAME).write_text(text)
    began = time.monotonic()
    own = holding(tmp_path)
    own.acquire()
    assert 0.6 <= time.monotonic() - began < 5
    assert capsys.readouterr().out.endswith(": no sign of life for 1 s\n")
    own.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moved", [-86400.0, 0.0, 86400.0])
def test_clocks_that_differ_by_a_day_mean_nothing(tmp_path: Path, moved: float, monkeypatch) -> None:
    """Whatever a living one's time is, it changes; that of a dead one may lie in the future."""
    with Other(tmp_path, job=7, run_folder="/runs/other"):
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + moved)
        with pytest.raises(ConfigError):
            holding(tmp_path).acquire()
    elsewhere(tmp_path)
    os.utime(tmp_path / NAME, (now() + moved, now() + moved))
    holding(tmp_path).acquire()


def test_one_that_was_paused_finds_that_it_was_taken_over_and_leaves_the_other_s(tmp_path: Path) -> None:
    with Other(tmp_path, job=7, run_folder="/runs/other") as first:
        os.kill(first.process.pid, signal.SIGSTOP)
        elsewhere(tmp_path)
        own = holding(tmp_path)
        own.acquire()
        os.kill(first.process.pid, signal.SIGCONT)
        assert first.ended() == ""  # it refuses to go on, and dies of it
        assert first.process.wait(30) == 1
        own.require()
        assert json.loads((tmp_path / NAME).read_text())["token"] == own.own.token


def test_a_disk_that_was_away_says_nothing_of_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server answers after hours: the holder, which waited for it too, touches its file a moment later."""
    with Other(tmp_path, job=7, run_folder="/runs/other") as first:
        os.kill(first.process.pid, signal.SIGSTOP)
        elsewhere(tmp_path)
        read, now, away, reads = Lease._read, time.monotonic, [0.0], []

        def answered(own: Lease) -> Any:
            state = read(own)
            reads.append(state)
            if len(reads) == 2:  # the first one of the watch
                away[0] = 7200.0
                os.kill(first.process.pid, signal.SIGCONT)
            return state

        monkeypatch.setattr(time, "monotonic", lambda: now() + away[0])
        monkeypatch.setattr(Lease, "_read", answered)
        with pytest.raises(ConfigError, match="another run uses this checkpoint folder"):
            holding(tmp_path).acquire()
        assert first.ended() == "released"


def test_of_many_that_see_the_same_dead_one_one_has_it(tmp_path: Path) -> None:
    with Other(tmp_path, job=7, run_folder="/runs/dead") as first:
        elsewhere(tmp_path)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    many = [holding(tmp_path, run_folder=f"/runs/{number}") for number in range(12)]

    def tried(one: Lease) -> bool:
        try:
            one.acquire()
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(tried, many)) == 1
    (owner,) = [one for one in many if json.loads((tmp_path / NAME).read_text())["token"] == one.own.token]
    owner.require()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_one_that_somebody_removed_is_there_again(tmp_path: Path) -> None:
    own = holding(tmp_path)
    own.acquire()
    (tmp_path / NAME).unlink()
    end = time.monotonic() + 10
    while not (tmp_path / NAME).exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    own.require()
    own.release()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_file_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        holding(tmp_path).acquire()
    assert not list(tmp_path.iterdir())


def test_a_server_that_fails_does_not_cost_the_holder_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Other(tmp_path, job=7, run_folder="/runs/other") as first:

        def failing(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        second = holding(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", failing)
            with pytest.raises(OSError, match="Input/output error"):
                second.acquire()
        assert (tmp_path / NAME).exists()
        assert first.ended() == "released"


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_file(tmp_path: Path, kind: str) -> None:
    """Nothing is written through a link, and opening a FIFO does not wait."""
    target = tmp_path / "elsewhere"
    if kind == "link":
        (tmp_path / NAME).symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(tmp_path / NAME)
    else:
        (tmp_path / NAME).mkdir()
    began = time.monotonic()
    with suppress(OSError, ConfigError):
        holding(tmp_path).acquire()
    assert time.monotonic() - began < 5
    assert not target.exists()


def test_one_that_comes_late_leaves_what_it_finds(tmp_path: Path) -> None:
    """It has seen the dead one too, and another has taken that one's place meanwhile."""
    (tmp_path / NAME).write_text("{}")
    quick, late = holding(tmp_path), holding(tmp_path)
    state = late._read()
    assert state == quick._read()
    assert state
    assert quick._replace(state)
    assert not late._replace(state)
    quick.require()
    with pytest.raises(ConfigError):
        late.require()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_while_it_is_taken_over_there_is_a_file_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third run that comes just then finds it."""
    (tmp_path / NAME).write_text("{}")
    rename, third = Path.rename, holding(tmp_path)

    def renamed(path: Path, target: Path) -> Path:
        assert not third._create(tmp_path / NAME)
        moved = rename(path, target)
        assert not third._create(tmp_path / NAME)
        return moved

    monkeypatch.setattr(Path, "rename", renamed)
    one = holding(tmp_path)
    one.acquire()
    one.require()
    one.release()
    assert not list(tmp_path.iterdir())
