"""Tokens are made once, whole or not at all, and whoever is killed while making them is taken over from."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

shards = pytest.importorskip("dray.train.shards")

TEXTS = ["abc", "", "de", "f" * 5000]


def encode(batch: list[str]) -> list[int]:
    return [token for text in batch for token in (*text.encode(), 256)]


def made(cache: Path, texts=TEXTS, *, vocabulary: int = 257, encode=encode):
    return shards.made(cache, shards.fingerprint("x"), lambda: texts, encode, end=256, vocabulary=vocabulary)


def test_documents_stand_in_a_row_with_an_end_after_each(tmp_path: Path) -> None:
    tokens = made(tmp_path / "my cache")
    assert tokens.starts.tolist() == [0, 4, 5, 8, 5009]
    assert tokens.ids[:8].tolist() == [97, 98, 99, 256, 256, 100, 101, 256]
    assert tokens.ids.dtype == np.uint16
    assert made(tmp_path / "big", vocabulary=1 << 17).ids.dtype == np.uint32


def test_a_part_has_its_own_documents(tmp_path: Path) -> None:
    tokens = made(tmp_path)
    part = tokens.part(2, 4)
    assert (part.ids[:3].tolist(), part.starts.tolist()) == ([100, 101, 256], [0, 3, 5004])


def test_a_block_goes_on_from_the_first_token_after_the_last(tmp_path: Path) -> None:
    tokens = made(tmp_path).part(0, 3)
    assert tokens.block(6, 4).tolist() == [101, 256, 97, 98]
    assert tokens.block(0, 20).tolist() == [97, 98, 99, 256, 256, 100, 101, 256] * 2 + [97, 98, 99, 256]


def test_they_are_made_once(tmp_path: Path) -> None:
    first = made(tmp_path)

    def never(_: list[str]) -> list[int]:
        raise AssertionError("made again")

    again = made(tmp_path, encode=never)
    assert again.ids.tolist() == first.ids.tolist()


def test_a_change_of_anything_is_another_fingerprint() -> None:
    prints = {shards.fingerprint(*parts) for parts in (("a",), ("b",), ("a", 1), ("a", "1", ""), ())}
    assert len(prints) == 5


def test_an_id_that_the_model_has_not_is_refused_and_nothing_stays(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        made(tmp_path, vocabulary=100)
    assert stopped.value.code == 78
    assert "  wanted: ids below 100\n  found:  256\n" in capsys.readouterr().err
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, capsys) -> None:
    def full(_: list[str]) -> list[int]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SystemExit) as stopped:
        made(tmp_path, encode=full)
    assert stopped.value.code == 1
    assert "the disk is full of tokens" in capsys.readouterr().err
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


MAKER = """
import sys, time
from pathlib import Path
from dray.train import shards
def encode(batch):
    print("making", flush=True)
    {then}
    return [token for text in batch for token in (*text.encode(), 256)]
tokens = shards.made(Path(sys.argv[1]), shards.fingerprint("x"), lambda: ["abc"], encode, end=256, vocabulary=257)
print(tokens.ids.tolist(), flush=True)
"""


def start(cache: Path, then: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", MAKER.replace("{then}", then), cache]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def test_one_makes_them_and_the_others_wait(tmp_path: Path) -> None:
    processes = [start(tmp_path, "time.sleep(0.5)") for _ in range(4)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum("making" in text for text in said) == 1
    assert {text.splitlines()[-1] for text in said} == {"[97, 98, 99, 256]"}


def test_a_killed_maker_is_taken_over_from(tmp_path: Path) -> None:
    with start(tmp_path, "time.sleep(60)") as first:
        assert first.stdout
        assert first.stdout.readline() == "making\n"
        second = start(tmp_path, "pass")
        time.sleep(0.3)
        os.kill(first.pid, signal.SIGKILL)
        out, _ = second.communicate(timeout=30)
    assert out.splitlines()[-2:] == ["making", "[97, 98, 99, 256]"]
    assert not list(tmp_path.glob("*.part-*"))


def test_a_file_that_lost_its_end_is_not_trusted(tmp_path: Path, capsys) -> None:
    made(tmp_path)
    (ids,) = tmp_path.glob("*/ids")
    os.truncate(ids, 1000)
    with pytest.raises(SystemExit):
        made(tmp_path)
    assert "the tokens on this disk are not whole" in capsys.readouterr().err


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
@pytest.mark.parametrize("host", ["other", shards._HOST])
def test_on_a_disk_without_locks_the_first_ones_stay(tmp_path: Path, monkeypatch, error: int, host: str) -> None:
    """As on some shared disks: another process, which no lock shows, is at work and ready first."""

    def none(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(shards.fcntl, "flock", none)

    def meanwhile(batch: list[str]) -> list[int]:
        monkeypatch.setattr(shards, "_HOST", host)
        monkeypatch.setattr(shards.os, "getpid", lambda: 7)
        made(tmp_path)
        return encode(batch)

    tokens = made(tmp_path, encode=meanwhile)
    assert tokens.ids[:4].tolist() == [97, 98, 99, 256]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
