"""Whole trainings whose disk fills, whose folder another run has, and whose checkpoints are mirrored."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import stores  # noqa: E402
from dray.runs.finish import finish  # noqa: E402
from dray.train.checkpoint import lease  # noqa: E402
from leases import Other  # noqa: E402
from trainings import Forks, Run  # noqa: E402

pytestmark = pytest.mark.torch
BEGUN = Callable[..., Run]
# What befalls the disk, at the steps that a test names; the trainer is as it is.
STAND_IN = """
import os
from dray.train.checkpoint import lease, manifest
from dray.train.checkpoint.checkpoints import Checkpoints
from dray.train.collectives import on_rank_0
lease.BEAT_S = 0.1
save, write = Checkpoints.save, manifest.write

def filled(filler):
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass

def saved(self, step, position):
    self.settle()
    filler = self.folder / "filler"
    if os.environ.get("FULL_AT") in (str(step), "any"):
        on_rank_0(lambda: filled(filler))
    if str(step) == os.environ.get("ROOM_AT"):
        on_rank_0(lambda: filler.unlink())
    save(self, step, position)

def written(folder, found):
    if folder.name.startswith(f"step-{os.environ.get('CUT_AT')}."):
        os.truncate(folder / "rank-0.safetensors", 10)
    write(folder, found)

Checkpoints.save, manifest.write = saved, written
"""


@pytest.fixture(scope="module")
def run(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> BEGUN:
    folder, count = tmp_path_factory.mktemp("my runs"), iter(range(99))
    return lambda ranks, *words, **more: Run(
        forks, folder / f"run-{next(count)}", ranks, *words, before=STAND_IN, **more
    )


@pytest.fixture(scope="module")
def alone(run: BEGUN) -> Run:
    return run(2).end()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 6 MB; a checkpoint of the tiny model has 0.4 MB."""
    path = tmp_path / "small disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m,mode=755", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


def left(run: Run, folder: Path) -> list[str]:
    """What is in a checkpoint folder after a run. Rank 0 frees the folder, unless another rank ended before and the
    ranks' parent killed it."""
    killed = {lease.NAME} if run.codes[0] == -signal.SIGKILL else set()
    return sorted({path.name for path in folder.iterdir()} - killed)


def saves(run: Run) -> list[tuple[int, bool]]:
    return [(event["checkpoint"], event["saved"]) for event in run.events("checkpoint")]


@pytest.mark.slow
@pytest.mark.tmpfs
@pytest.mark.hostile("disks")
def test_a_full_disk_costs_saves_and_not_the_run(run: BEGUN, alone: Run, small: Path) -> None:
    words = (f"checkpoint.folder={small}", "checkpoint.every=4", "checkpoint.keep=2")
    other = run(2, *words).end(FULL_AT="12", ROOM_AT="20")
    assert other.losses() == alone.losses()
    assert saves(other) == [(4, True), (8, True), (12, False), (16, False), (20, True)]
    assert sorted(path.name for path in small.iterdir()) == ["step-20", "step-8"]
    lines = [line for line in other.log(1).read_text().splitlines() if line.startswith("step ")]
    warned = [number for number, line in enumerate(lines, 1) if "  WARNING: not saved: No space left on device" in line]
    # It is known when the write has failed, and at the latest when the next one begins.
    assert set(range(17, 21)) <= set(warned) <= set(range(12, 21))
    assert lines[16].endswith("; the newest checkpoint is of step 8")
    found = finish(other.paths, code=0)
    assert (found.status, len(found.warnings)) == ("done", 1)
    assert found.warnings[0].startswith("2 checkpoints not saved, the first of step 12: No space left on device")
    assert found.warnings[0].endswith(f": {small}; the last one was saved")


@pytest.mark.tmpfs
@pytest.mark.hostile("disks")
def test_the_run_folder_itself_is_on_the_full_disk(forks: Forks, alone: Run, small: Path) -> None:
    """Logs, metrics and TensorBoard's files have no room either, and end nothing; the metrics are there afterwards."""
    other = Run(forks, small / "run", 2, "checkpoint.every=4", before=STAND_IN).end(FULL_AT="8", ROOM_AT="16")
    assert other.losses() == alone.losses()
    assert [event["step"] for event in other.events("step")] == list(range(1, 21))
    assert saves(other) == [(4, True), (8, False), (12, False), (16, True), (20, True)]
    assert (other.paths.final_model / "config.json").is_file()


@pytest.mark.tmpfs
@pytest.mark.hostile("disks")
def test_a_last_save_that_fails_is_a_failure_after_the_model(run: BEGUN, small: Path) -> None:
    other = run(2, f"checkpoint.folder={small}", "checkpoint.every=4", steps="steps=8").end(69, FULL_AT="8")
    assert "No space left on device" in other.log().read_text()
    assert (other.paths.final_model / "config.json").is_file()
    assert left(other, small) == ["filler", "step-4"]
    (small / "filler").unlink()
    again = run(2, f"checkpoint.folder={small}", "checkpoint.every=4", steps="steps=8").end()
    assert again.events("start")[0]["first_step"] == 4
    assert again.losses() == other.losses()[4:]


@pytest.mark.tmpfs
@pytest.mark.hostile("disks")
def test_a_model_that_does_not_fit_leaves_no_part_of_itself(forks: Forks, small: Path) -> None:
    other = Run(forks, small / "run", 2, "checkpoint.every=4", steps="steps=8", before=STAND_IN)
    with other.going(FULL_AT="8"):
        pass
    assert 69 in other.codes
    assert left(other, other.folder / "checkpoints") == ["filler", "step-4"]


@pytest.mark.tmpfs
@pytest.mark.hostile("disks")
def test_a_run_that_is_asked_to_end_and_cannot_save_says_so(run: BEGUN, small: Path) -> None:
    """75 would promise that the same again goes on from there."""
    other = run(2, f"checkpoint.folder={small}", steps="steps=100000")
    with other.going(FULL_AT="any") as pids:
        until(lambda: other.paths.metrics.exists() and len(other.events("step")) > 1, other)
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
    assert 69 in other.codes
    assert 75 not in other.codes
    assert "No space left on device" in other.said()
    assert left(other, small) == ["filler"]


@pytest.mark.hostile("disks")
def test_retention_keeps_the_last_good_one_where_a_newer_is_damaged(run: BEGUN) -> None:
    other = run(2, "checkpoint.every=4", "checkpoint.keep=1", steps="steps=10").end(69, CUT_AT="8")
    assert saves(other) == [(4, True), (8, False)]
    assert "rank-0.safetensors has 10 bytes, but " in other.said()
    assert sorted(path.name for path in (other.folder / "checkpoints").iterdir()) == ["final", "step-4"]


def until(happened: Callable[[], Any], other: Run) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, other.said()
        time.sleep(0.01)


@pytest.mark.hostile("checkpoints")
def test_two_runs_on_one_folder(run: BEGUN, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused; what was killed with -9 keeps nobody waiting."""
    monkeypatch.setenv("NODE", "node-7")
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o755)
    words = (f"checkpoint.folder={kept}", "checkpoint.every=1")
    with Other(kept, job=4711):
        second = run(2, *words).end(78)
        assert second.codes.count(78) >= 1
        assert "another run uses this checkpoint folder\n" in second.said()
        assert "found:  job 4711 on node-7, run /runs/one, attempt 1, since " in second.said()
    third = run(2, *words, steps="steps=100000")
    with third.going() as pids:
        until(lambda: any(path.name[5:].isdigit() for path in kept.glob("step-*")), third)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert (kept / lease.NAME).exists()
    fourth = run(2, *words, steps="steps=100000")
    with fourth.going() as pids:
        until(lambda: fourth.paths.metrics.exists() and len(fourth.events("step")) > 1, fourth)
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
    assert set(fourth.codes) - {-9} == {75}  # the first that ends ends the others, as a launcher
    assert fourth.events("start")[0]["first_step"] >= 1
    assert ": its process has ended\n" in fourth.said()
    assert lease.NAME not in left(fourth, kept)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.Store]:
    with stores.serving({}) as served:
        served.buckets.add("bucket")
        yield served


def test_a_run_goes_on_from_its_mirror(run: BEGUN, alone: Run, store: stores.Store) -> None:
    """The folder is lost; on the way a connection was cut, and no step waited for it."""
    words = ("checkpoint.every=4", "checkpoint.mirror=s3://bucket/mine", "checkpoint.keep=2")
    env = {
        "AWS_ENDPOINT_URL": store.address,
        "AWS_ACCESS_KEY_ID": "AKIAMAYREAD",
        "AWS_SECRET_ACCESS_KEY": "hunter2hunter2",
    }
    store.cuts = 1
    first = run(2, *words, steps="steps=12").end(**env)
    assert first.losses() == pytest.approx(alone.losses()[:12], abs=1)  # of another schedule
    complete = [int(name.split("/")[2][5:]) for name in store.objects if name.endswith("manifest.json")]
    assert max(complete) == 12
    assert "hunter2" not in first.said() + first.paths.metrics.read_text()
    assert first.events("mirror") == []  # each file that came to harm was sent again
    again = run(2, *words).end(**env)
    assert again.events("start")[0]["first_step"] == 12
    assert "step-12 of s3://bucket/mine is fetched\n" in again.said()
    assert len({name.split("/")[2] for name in store.objects if "/step-" in name}) == 2


@pytest.mark.hostile("checkpoints")
def test_a_damaged_checkpoint_is_mended_from_the_mirror(run: BEGUN, alone: Run, tmp_path: Path) -> None:
    words = ("checkpoint.every=8", f"checkpoint.folder={tmp_path}/kept", f"checkpoint.mirror={tmp_path}/far")
    run(2, *words).end()
    (tmp_path / "kept/step-16/rank-1.safetensors").unlink()
    again = run(2, *words).end()
    assert again.events("start")[0]["first_step"] == 16
    assert again.losses() == alone.losses()[16:]
    assert f"step-16 of {tmp_path}/far is fetched\n" in again.said()
    shutil.rmtree(tmp_path / "kept")
    (tmp_path / "far/step-16/rank-1.safetensors").write_bytes(b"x")
    third = run(2, *words).end()
    assert third.events("start")[0]["first_step"] == 8
    assert third.losses() == alone.losses()[8:]


@pytest.mark.hostile("checkpoints")
def test_a_mirror_that_fails_is_a_warning(run: BEGUN, alone: Run, store: stores.Store) -> None:
    """A run that has a checkpoint goes on without it, and the job ends well; the result says so."""
    words = ("checkpoint.every=4", "checkpoint.mirror=s3://bucket/mine")
    first = run(2, *words, steps="steps=4").end(AWS_ENDPOINT_URL=store.address)
    again = run(2, *words, steps="steps=60")
    shutil.copytree(first.folder / "checkpoints/step-4", again.folder / "checkpoints/step-4")
    store.buckets.clear()
    again.end(AWS_ENDPOINT_URL=store.address)
    found = finish(again.paths, code=0)
    assert found.status == "done"
    assert "not copied, the first of step " in found.warnings[0]
    assert " s left  WARNING: the copy of step " in again.log(0).read_text()
