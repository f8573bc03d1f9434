"""A node's own folder: nobody else's, gone when nobody uses it, and never in the way of a run that does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dray.contract import scratch
from dray.contract.findings import UnfitError

pytestmark = pytest.mark.hostile("/tmp")

OWN = f"dray-{os.geteuid()}-"
HOLD = "import sys; from dray.contract import scratch; scratch.take(sys.argv[1]); print('held', flush=True); input()"


def held(folder: Path) -> subprocess.Popen[str]:
    """A runner that has it."""
    argv = [sys.executable, "-c", HOLD, str(folder)]
    runner = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert runner.stdout
    assert runner.stdout.readline() == "held\n"
    return runner


def end(runner: subprocess.Popen[str], number: signal.Signals = signal.SIGKILL) -> None:
    runner.send_signal(number)
    runner.communicate()


def test_it_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(scratch.take(str(tmp_path / "own")))
    finally:
        os.umask(before)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


def test_nodes_of_one_machine_share_it(tmp_path: Path) -> None:
    first = held(tmp_path / f"{OWN}a")
    os.close(scratch.take(str(tmp_path / f"{OWN}a")))
    end(first)


def writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def link(folder: Path) -> None:
    (folder.parent / "real").mkdir(mode=0o700)
    folder.symlink_to("real")


def file(folder: Path) -> None:
    folder.write_text("x")
    folder.chmod(0o644)


def another_users(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)


ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="root gives a folder to another user")


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (writable, "a folder that others may write, mode 0770"),
        (link, "a link in place of a folder"),
        (file, "no folder"),
        pytest.param(another_users, "a folder of user 65534, mode 0700", marks=ROOT_ONLY),
    ],
)
def test_what_a_stranger_made_is_refused(tmp_path: Path, plant, found: str) -> None:
    plant(tmp_path / "own")
    with pytest.raises(UnfitError, match="the node's own folder is not private") as refused:
        scratch.take(str(tmp_path / "own"))
    assert refused.value.finding.found == found


def test_what_a_killed_runner_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    dead, alive = held(tmp_path / f"{OWN}dead"), held(tmp_path / f"{OWN}alive")
    (tmp_path / f"{OWN}dead" / "triton").mkdir()
    end(dead)
    others = [tmp_path / "dray-1234567-of another user", tmp_path / f"{OWN}without a lock", tmp_path / "something"]
    for other in others:
        other.mkdir(mode=0o700)
    os.close(scratch.take(str(tmp_path / f"{OWN}new")))
    assert {path.name for path in tmp_path.iterdir()} == {f"{OWN}alive", f"{OWN}new", *(path.name for path in others)}
    end(alive)


@pytest.mark.skipif(os.geteuid() != 0, reason="root plants a link in a folder that it gives away")
def test_a_planted_folder_is_not_cleared_through_a_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "lock").touch()
    (tmp_path / f"{OWN}planted").symlink_to(mine)
    os.close(scratch.take(str(tmp_path / f"{OWN}new")))
    assert (mine / "lock").exists()
