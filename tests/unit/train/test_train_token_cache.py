"""Tokens are made by one rank of each node, atomically, whether the disk has locks or not."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

np = pytest.importorskip("numpy")
token_cache = pytest.importorskip("dray.train.data.token_cache")
from dray.contract.findings import DrayError  # noqa: E402
from dray.runs.clean import tokens_in  # noqa: E402

pytestmark = pytest.mark.hostile("token cache")

TEXTS = ["abc", "", "de", "f" * 5000]


def encode(batch: list[str]) -> list[int]:
    return [token for text in batch for token in (*text.encode(), 256)]


def made(cache: Path, texts=TEXTS, *, vocabulary: int = 257, encode=encode):
    return token_cache.cached(
        cache, token_cache.fingerprint("x"), lambda: texts, encode, end=256, vocabulary=vocabulary
    )


def test_documents_stand_in_a_row_with_an_end_after_each(tmp_path: Path) -> None:
    tokens = made(tmp_path / "my cache")
    assert tokens.starts.tolist() == [0, 4, 5, 8, 5009]
    assert tokens.ids[:8].tolist() == [97, 98, 99, 256, 256, 100, 101, 256]
    assert tokens.ids.dtype == np.uint16
    assert made(tmp_path / "big", vocabulary=1 << 17).ids.dtype == np.uint32


def test_a_run_that_uses_tokens_makes_them_younger(tmp_path: Path) -> None:
    made(tmp_path)
    (folder,) = tmp_path.iterdir()
    for file in folder.iterdir():
        os.utime(file, (time.time() - 9 * 86400,) * 2)
    os.utime(folder, (time.time() - 9 * 86400,) * 2)
    assert [round(item.days) for item in tokens_in(tmp_path)] == [9]
    made(tmp_path)
    assert [round(item.days) for item in tokens_in(tmp_path)] == [0]


def test_a_part_has_its_own_documents(tmp_path: Path) -> None:
    tokens = made(tmp_path)
    part = tokens.part(2, 4)
    assert (part.ids[:3].tolist(), part.starts.tolist()) == ([100, 101, 256], [0, 3, 5004])


def test_a_slice_goes_on_with_the_first_token_after_the_last(tmp_path: Path) -> None:
    tokens = made(tmp_path).part(0, 3)
    assert tokens.slice(6, 4).tolist() == [101, 256, 97, 98]
    assert tokens.slice(0, 20).tolist() == [97, 98, 99, 256, 256, 100, 101, 256] * 2 + [97, 98, 99, 256]


def test_they_are_made_once(tmp_path: Path) -> None:
    first = made(tmp_path)

    def never(_: list[str]) -> list[int]:
        raise AssertionError("made again")

    again = made(tmp_path, encode=never)
    assert again.ids.tolist() == first.ids.tolist()


def test_a_change_of_anything_is_another_fingerprint() -> None:
    prints = {token_cache.fingerprint(*parts) for parts in (("a",), ("b",), ("a", 1), ("a", "1", ""), ())}
    assert len(prints) == 5


def test_an_id_that_the_model_lacks_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(DrayError) as stopped:
        made(tmp_path, vocabulary=100)
    assert stopped.value.finding.code == 78
    assert "  wanted: ids below 100\n  found:  256\n" in str(stopped.value)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    def full(_: list[str]) -> list[int]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DrayError, match="the disk is full: it has no room for the tokens") as stopped:
        made(tmp_path, encode=full)
    assert stopped.value.finding.code == 1
    assert list(tmp_path.iterdir()) == []


def cut(folder: Path) -> None:
    os.truncate(folder / "ids", 1000)


def flip(folder: Path) -> None:
    with (folder / "ids").open("r+b") as file:
        file.write(b"z")


def plant(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"kind": "uint16", "sha256": {"ids": "0", "starts": "0"}}')


def lose(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def garble(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"[\xff")


@pytest.mark.parametrize("damage", [cut, flip, plant, lose, garble])
def test_other_bytes_than_were_written_are_not_trained_on(tmp_path: Path, damage) -> None:
    made(tmp_path)
    (folder,) = tmp_path.iterdir()
    damage(folder)
    with pytest.raises(DrayError, match="tokens in the cache are damaged") as refused:
        made(tmp_path)
    assert refused.value.finding.fix == f"rm -r '{folder}'"


@pytest.mark.parametrize("which", ["cache", "tokens"])
@pytest.mark.parametrize("how", ["mode", "owner", "link"])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, which: str, how: str) -> None:
    cache = tmp_path / "cache"
    made(cache)
    assert (cache.stat().st_mode & 0o777, next(cache.iterdir()).stat().st_mode & 0o777) == (0o700, 0o700)
    folder = cache if which == "cache" else next(cache.iterdir())
    if how == "mode":
        folder.chmod(0o770)
    elif how == "owner":
        if os.geteuid() != 0:
            pytest.skip("root gives a folder to another user")
        os.chown(folder, 65534, 65534)
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DrayError, match="the token cache is open to other users") as refused:
        made(cache)
    assert refused.value.finding.code == 78
    assert refused.value.finding.where == str(folder)


def test_a_cache_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cache")
    with pytest.raises(DrayError, match="the token cache is open to other users") as refused:
        made(tmp_path / "cache")
    assert (refused.value.finding.code, refused.value.finding.found) == (78, "no folder")


def test_without_locks_another_run_may_be_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)

    def meanwhile(batch: list[str]) -> list[int]:
        made(tmp_path)
        return encode(batch)

    assert made(tmp_path, encode=meanwhile).ids[:4].tolist() == [97, 98, 99, 256]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_waits_for_another_that_makes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As jobs of an array do, whose tokens are the same."""
    begun, may_end, waits = Event(), Event(), Event()
    begins = "another run makes these tokens; this one waits for it: "
    monkeypatch.setattr(token_cache, "say", lambda text: text.startswith(begins) and waits.set())

    def slow(batch: list[str]) -> list[int]:
        begun.set()
        assert may_end.wait(60)
        return encode(batch)

    def never(_: list[str]) -> list[int]:
        raise AssertionError("made again")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(made, tmp_path, encode=slow)
        assert begun.wait(60)
        second = pool.submit(made, tmp_path, encode=never)
        assert waits.wait(60)
        may_end.set()
        assert second.result(60).ids.tolist() == first.result(60).ids.tolist()


RANKS = """
import errno, fcntl, os, socket, sys, time
from pathlib import Path
fcntl.flock = lambda *_: None  # as Lustre without -o flock grants every lock
from dray.train import collectives
from dray.train.data import token_cache
from dray.train.errors import guarded

def tell(line):
    with open(f"{sys.argv[1]}.log", "a") as log:  # gloo writes to stdout
        log.write(f"{line}\\n")

def rank(cache, way):
    def encode(batch):
        tell("making")
        time.sleep(0.2)
        if way in ("ENOSPC", "EIO"):
            raise OSError(number := getattr(errno, way), os.strerror(number))
        if way == "other tokens":
            batch = [f"{text}{os.environ['RANK']}" for text in batch]
        return [token for text in batch for token in (*text.encode(), 256)]
    if way == "other tokens":  # a disk of each node's own
        cache = f"{cache}-{int(os.environ['RANK']) // 2}"
    collectives.init_distributed("cpu")
    tokens = token_cache.cached(Path(cache), "x", lambda: ["abc"], encode, end=256, vocabulary=257)
    tell(tokens.ids.tolist())

for number in range(int(sys.argv[3])):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for one in range(4):
        if os.fork() == 0:
            local = one % 2 if sys.argv[2] in ("two nodes", "other tokens") else one
            os.environ.update(RANK=str(one), LOCAL_RANK=str(local), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1")
            os.environ["MASTER_PORT"] = str(port)
            guarded(rank, f"{sys.argv[1]}/{number}", sys.argv[2])
    tell([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)])
"""


def ranks(cache: Path, way: str, rounds: int) -> tuple[list[str], str]:
    """What they tell, and what they write to stderr."""
    argv = [sys.executable, "-c", RANKS, cache, way, str(rounds)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
    return Path(f"{cache}.log").read_text().splitlines(), ended.stderr


@pytest.mark.slow
def test_one_rank_of_a_node_makes_them_where_every_lock_is_granted(tmp_path: Path) -> None:
    """Five times with four ranks: three of them died with FileNotFoundError each time where a lock decided."""
    lines, _ = ranks(tmp_path, "one node", 5)
    assert sorted(lines) == sorted(["making", "[0, 0, 0, 0]", *["[97, 98, 99, 256]"] * 4] * 5)


@pytest.mark.slow
def test_two_nodes_may_share_a_cache_without_locks(tmp_path: Path) -> None:
    lines, _ = ranks(tmp_path, "two nodes", 3)
    assert lines.count("[0, 0, 0, 0]") == 3
    assert lines.count("[97, 98, 99, 256]") == 12
    assert [path.name for path in tmp_path.glob("*/*")] == ["x"] * 3
    assert lines.count("making") == 3, "rank 0 makes them for both"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "problem"),
    [("ENOSPC", 1, "the disk is full: it has no room for the tokens"), ("EIO", 69, "Input/output error")],
)
def test_what_stops_the_maker_ends_all_ranks(tmp_path: Path, error: str, code: int, problem: str) -> None:
    lines, errors = ranks(tmp_path, error, 1)
    assert lines == ["making", str([code] * 4)]
    assert errors.count(f"{problem}\n  where:") == 4


@pytest.mark.slow
def test_nodes_that_have_made_other_tokens_do_not_train(tmp_path: Path) -> None:
    lines, errors = ranks(tmp_path, "other tokens", 1)
    assert lines == ["making", "making", "[78, 78, 78, 78]"]
    assert errors.count("the nodes made different tokens from the same rows\n") == 4
    assert errors.count("other tokens on 2 of 4 ranks, first on rank 2\n") == 4
