"""`dray cache`: the tokens on this machine, and what killed runs left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dray.contract import node, scratch

pytestmark = pytest.mark.hostile("token cache")

OWN = f"{node.OWN}{os.getuid()}-"


def dray(*argv: str | Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "dray", "cache", *argv], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def made(cache: Path, name: str, days: float = 0) -> Path:
    token_cache = pytest.importorskip("dray.train.data.token_cache")
    token_cache.cached(
        cache, token_cache.fingerprint(name), lambda: ["text"], lambda texts: [*texts[0].encode(), 256],
        end=256, vocabulary=257, dataset=f"/data/{name}.txt",
    )  # fmt: skip
    folder = cache / token_cache.fingerprint(name)
    for file in folder.iterdir():
        os.utime(file, (time.time() - days * 86400,) * 2)
    return folder


def test_it_lists_the_newest_first(tmp_path: Path) -> None:
    cache = tmp_path / "my cache"
    old, new = made(cache, "old", days=9), made(cache, "new")
    (cache / "notes.txt").write_text("not tokens")
    code, out = dray("list", cache)
    first, second, last = out.splitlines()
    assert code == 0
    assert re.fullmatch(rf" +0\.0 MB +0\.0 days  {new}  /data/new\.txt", first)
    assert re.fullmatch(rf" +0\.0 MB +9\.0 days  {old}  /data/old\.txt", second)
    assert last == f"2 in {cache}, 0.0 MB"


def test_it_removes_what_is_unused_and_nothing_else(tmp_path: Path) -> None:
    old, new = made(tmp_path, "old", days=9), made(tmp_path, "new")
    being_made = tmp_path / f"{'a' * 24}.part-{'b' * 16}"
    being_made.mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / ("c" * 24)).symlink_to("mine")
    for words, gone in ((("--unused", "3"), old), ((), new)):
        code, out = dray("clean", tmp_path, *words)
        # Runs beside these tests may have been killed, and what they left goes too.
        lines = [line for line in out.splitlines() if not line.startswith(f"removed {OWN}")]
        assert (code, lines) == (0, [f"removed {gone}", "0.0 MB of tokens removed"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([being_made.name, "c" * 24, "mine"])


def test_a_run_that_uses_tokens_moves_them_up(tmp_path: Path) -> None:
    folder = made(tmp_path, "old", days=9)
    token_cache = pytest.importorskip("dray.train.data.token_cache")
    token_cache.cached(tmp_path, folder.name, list, lambda _: [], end=256, vocabulary=257)
    assert " 0.0 days " in dray("list", tmp_path)[1]


def test_what_a_killed_runner_left_goes_and_what_runs_stays(tmp_path: Path) -> None:
    left, used = f"{OWN}test-left-{os.getpid()}", f"{OWN}test-used-{os.getpid()}"
    os.close(scratch.take(used))
    hold = f"from dray.contract import scratch; scratch.take({used!r}); print('held', flush=True); input()"
    runner = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert runner.stdout
    assert runner.stdout.readline() == "held\n"
    Path(left).mkdir(0o700)
    Path(left, "lock").touch(0o600)
    code, out = dray("clean", tmp_path)
    assert (code, f"removed {left}\n" in out, used in out, Path(left).exists(), Path(used).exists()) == (
        0, True, False, False, True,
    )  # fmt: skip
    runner.communicate("\n")
    dray("clean", tmp_path)
    assert not Path(used).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders of other users")
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_another_users_is_not_touched(kind: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    made(theirs, "x")
    os.chown(theirs, 65534, 65534)
    cache = theirs
    if kind == "link":
        cache = tmp_path / "link"
        cache.symlink_to(theirs)
    for verb in ("list", "clean"):
        code, out = dray(verb, cache)
        assert (code, out.splitlines()[0]) == (78, "dray: the cache is open to other users")
    assert len(list(theirs.iterdir())) == 1


def test_no_cache() -> None:
    code, out = dray("list", "/not/there")
    assert (code, out.splitlines()[0]) == (78, "dray: the cache folder does not exist")
