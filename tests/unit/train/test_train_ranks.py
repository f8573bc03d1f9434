"""Checkpoints of many ranks, which are threads here: who hears what, which files there are, and what is damaged."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.contract.findings import UnfitError  # noqa: E402
from dray.train.checkpoint import manifest  # noqa: E402
from dray.train.checkpoint.staging import Staged  # noqa: E402
from dray.train.collectives import on_all  # noqa: E402
from ranks import Sharded, World, checkpoints  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.hostile("checkpoints")]
SHAPES = {f"weights.layer.{number}": (72, 3) for number in range(10)} | {"weights.small": (5, 1)}
RANKS = 17


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
def test_all_ranks_have_what_rank_0_makes_of_all_values(count: int) -> None:
    """In the order of the ranks, and no rank hears more than log2 N others and the result."""
    world = World(count)
    found = world.each(
        lambda rank: on_all(lambda: [rank], lambda some, others: some + others, lambda all_: [*all_, -1])
    )
    assert found == [[*range(count), -1]] * count
    most = math.ceil(math.log2(count)) if count > 1 else 0
    assert len(world.heard[0]) == 2 * most  # a size and the text
    assert max(map(len, world.heard)) <= 2 * (most + 1)


@pytest.mark.parametrize("failing", [{0}, {4}, {6}, {3, 5}, {*range(7)}, {"then"}])
def test_where_one_fails_all_fail_alike(failing: set[Any]) -> None:
    def attempt(name: Any) -> int:
        if name in failing:
            raise UnfitError("no", wanted="yes", found=f"rank {name}", fix="try")
        return 1

    found = World(7).each(
        lambda rank: on_all(lambda: attempt(rank), int.__add__, lambda total: [total, attempt("then")])
    )
    assert {(type(error), error.finding.found) for error in found} == {(UnfitError, f"rank {min(failing)}")}


def test_a_disk_that_fails_on_one_rank_ends_all_alike() -> None:
    def attempt(rank: int) -> int:
        if rank == 1:
            raise OSError(errno.EIO, "Input/output error", "/scratch/x")
        return 1

    found = World(3).each(lambda rank: on_all(lambda: attempt(rank), int.__add__))
    assert {(error.problem, error.finding.where, error.finding.code) for error in found} == {
        ("Input/output error", "/scratch/x", 69)
    }


def save(folder: Path, *steps: int, count: int = RANKS) -> World:
    world = World(count)

    def do(rank: int) -> None:
        own = checkpoints(folder, Sharded(SHAPES, rank, count))
        for step in steps:
            own.save(step, [[rank, rank, step, [7] * rank]])
            own.settle()

    assert [*filter(None, world.each(do))] == []
    return world


def resume(folder: Path, count: int, *, mirror: str = "") -> list[Any]:
    """Of each rank the newest step, the positions that there are, and its own."""

    def do(rank: int) -> tuple[Any, ...]:
        strategy = Sharded(SHAPES, rank, count)
        own = checkpoints(folder, strategy, mirror=mirror)
        own.find()
        feed = own.resume()
        return own.newest, strategy.is_read(), len(feed), [*feed[rank][:3], *feed[rank][3]] if rank in feed else []

    return World(count).each(do)


@pytest.mark.parametrize("count", [1, 5, RANKS, 31])
def test_any_number_of_ranks_reads_what_many_wrote(tmp_path: Path, count: int) -> None:
    """From one file a rank and a manifest, which does not grow with ranks times tensors."""
    save(tmp_path, 4)
    assert len([*(tmp_path / "step-4").iterdir()]) == RANKS + 1
    found = json.loads((tmp_path / "step-4/manifest.json").read_text())
    assert [found["tensors"][f"weights.{name}"]["shards"] for name in ("layer.3", "small")] == [
        [[0, 0, 15, 14], [14, 210, 6, 1]], [[0, 0, 1, 5]],
    ]  # fmt: skip
    wanted = [[rank, rank, 4, *[7] * rank] if rank < RANKS else [] for rank in range(count)]
    assert resume(tmp_path, count) == [(4, True, RANKS, own) for own in wanted]


def test_rank_0_hears_as_many_as_a_tree_has_levels(tmp_path: Path) -> None:
    heard = {count: save(tmp_path / f"{count}", 4, count=count).heard for count in (4, 32)}
    messages = {count: len(each[0]) for count, each in heard.items()}
    assert messages == {4: 2 * 2, 32: 2 * 5}  # what was written, after its length
    assert max(map(sum, heard[32])) < 3 * len((tmp_path / "32/step-4/manifest.json").read_bytes())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def another(path: Path) -> None:
    path.write_text(path.read_text().replace('"updates": 8', '"updates": 9'))


@pytest.mark.parametrize(
    ("harm", "name", "said"),
    [
        (cut, "rank-7.safetensors", "rank-7.safetensors is not what was written"),
        (flip, "rank-16.safetensors", "rank-16.safetensors is not what was written"),
        (os.unlink, "rank-1.safetensors", "rank-1.safetensors: No such file or directory"),
        (os.unlink, "manifest.json", "its manifest cannot be read ([Errno 2] No such file or directory"),
        (cut, "manifest.json", "its manifest cannot be read (Expecting"),
        (another, "manifest.json", "its manifest is not what was written"),
    ],
)
@pytest.mark.parametrize("count", [3, RANKS])
def test_what_is_damaged_is_named_and_the_older_one_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Any], None], name: str, said: str, count: int
) -> None:
    save(tmp_path, 4, 8)
    harm(tmp_path / "step-8" / name)
    assert {one[:3] for one in resume(tmp_path, count)} == {(4, True, RANKS)}
    assert f"checkpoint {tmp_path}/step-8 is skipped: {said}" in capsys.readouterr().out
    assert sorted(path.name.split("-")[1][:8] for path in tmp_path.iterdir()) == ["4", "8.broken"]


def test_a_damaged_one_that_cannot_be_renamed_ends_all_ranks_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4, 8)
    (tmp_path / "step-8/rank-1.safetensors").unlink()

    def refused(path: Path, _: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "rename", refused)
    found = resume(tmp_path, 3)
    assert {(type(error), error.finding.found, error.finding.fix) for error in found} == {
        (UnfitError, "Read-only file system", "check the disk and its quota; step-8 is damaged")
    }


def test_three_of_many_damaged_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 8)
    for rank in (3, 10, 9, 12, 16):
        (tmp_path / f"step-8/rank-{rank}.safetensors").unlink()
    assert {one[0] for one in resume(tmp_path, RANKS)} == {None}
    lost = capsys.readouterr().out.partition("is skipped: ")[2].splitlines()[0].split("; ")
    assert len(lost) == 3
    assert all(one.endswith(": No such file or directory") for one in lost)


@pytest.mark.parametrize("dying", [0, 7, 16])
def test_a_rank_that_dies_while_it_saves_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dying: int
) -> None:
    """No rank waits for it for ever."""
    save(tmp_path, 4)
    write = Staged.write

    def die(staged: Staged, *given: Any) -> Any:
        if staged.rank == dying:
            raise KeyError("killed")
        return write(staged, *given)

    monkeypatch.setattr(Staged, "write", die)
    world = World(RANKS)
    found = world.each(lambda rank: _saved(checkpoints(tmp_path, Sharded(SHAPES, rank, RANKS)), 8))
    assert all(isinstance(error, RuntimeError | KeyError) for error in found)
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} >= {"step-4"}
    assert not (tmp_path / "step-8").exists()
    monkeypatch.undo()
    assert {one[:2] for one in resume(tmp_path, RANKS)} == {(4, True)}


def _saved(own: Any, step: int) -> None:
    own.save(step, None)
    own.settle()


def test_who_waits_for_a_write_that_goes_on_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: here each block waits for a beat after the one before."""
    beaten, left = threading.Event(), []
    monkeypatch.setattr("dray.train.runtime.heartbeat.heartbeat.beat", beaten.set)
    monkeypatch.setattr("dray.train.checkpoint.checkpoints.BEAT_S", 0.01)
    monkeypatch.setattr(manifest, "BLOCK", 500)
    world = World(1)

    def do(rank: int) -> None:
        own = checkpoints(tmp_path, Sharded(SHAPES, rank, 1))
        count = own._moved.count

        def counted(size: int) -> None:
            beaten.clear()
            count(size)
            left.append(beaten.wait(30 * all(left)))

        monkeypatch.setattr(own._moved, "count", counted)
        with ThreadPoolExecutor(1, initializer=lambda: setattr(world._own, "rank", rank)) as own._writer:
            _saved(own, 4)

    assert world.each(do) == [None]
    assert (len(left) > 10, all(left)) == (True, True)
    assert resume(tmp_path, 1)[0][:2] == (4, True)
