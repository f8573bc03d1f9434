"""Checkpoints in a bucket or another folder: copied, the manifest last, fetched, and what goes wrong."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="pyarrow: the training stack is not installed (make demo installs it)")
pytest.importorskip("huggingface_hub", reason="the training stack is not installed (make demo installs it)")

import stores
from dray.contract.findings import DrayError, UnfitError
from dray.train.checkpoint import manifest
from dray.train.checkpoint.mirror import Mirror
from dray.train.runtime.heartbeat import Moved
from ranks import World

pytestmark = pytest.mark.hostile("checkpoints")
ELSEWHERE = Path("/")


class Events(list):
    def write(self, event: str, shown: str, **fields: Any) -> None:
        self.append((event, fields["checkpoint"], fields["saved"]))


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.Store]:
    """The server, with an empty bucket b."""
    with stores.serving({}) as served:
        served.buckets.add("b")
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAMAYREAD")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        stores.forget()
        yield served
    stores.forget()


@pytest.fixture(params=["s3", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "s3://b/my/runs" if request.param == "s3" else str(tmp_path / "far away")


def checkpoint(folder: Path, step: int, size: int = 1000) -> Path:
    path = folder / f"step-{step}"
    path.mkdir(mode=0o755, parents=True)
    data = os.urandom(size)
    files = {name: manifest.write_file(path / name, data) for name in ("rank-0.safetensors", "rank-1.safetensors")}
    manifest.write(path, {"version": 3, "step": step, "files": files})
    return path


def copied(place: str, *paths: Path, keep: int = 2) -> Mirror:
    made = Mirror(place, Events(), keep=keep)
    for path in paths:
        made.put(path)
        made.settle()
    return made


def fetched(place: str, step: int, to: Path) -> str:
    part = to / f"step-{step}"
    part.mkdir(mode=0o755, parents=True)
    return Mirror(place, Events(), keep=2).fetch(part, part.name, required=False)


def content(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


def test_what_was_copied_is_fetched_to_the_last_byte(place: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "own", 4, 11 << 20)  # of two parts in a bucket
    made = copied(place, path)
    assert (made.trouble, made.metrics) == ("", [])
    assert Mirror(place, Events(), keep=2).find(ELSEWHERE, required=True) == [4]
    assert fetched(place, 4, tmp_path / "new") == ""
    assert content(tmp_path / "new/step-4") == content(path)
    assert manifest.damage(tmp_path / "new/step-4", manifest.read(path)) == []
    manifest.require_own(tmp_path / "new/step-4")


def test_the_newest_stay_and_others_of_the_place_too(place: str, tmp_path: Path) -> None:
    paths = [checkpoint(tmp_path / "own", step) for step in (2, 4, 6, 8, 90)]
    copied(place, paths[4])  # of a run that was further, and whose checkpoint was lost
    made = copied(place, *paths[:4])
    assert made.find(ELSEWHERE, required=True) == [6, 8, 90]


def test_the_manifest_comes_last(store: stores.Store, tmp_path: Path) -> None:
    copied("s3://b/x", checkpoint(tmp_path, 4))
    written = [path for verb, path in store.asked if verb in ("PUT", "POST")]
    last = "b/x/step-4/manifest.json"
    first = written.index(last)
    assert {*written[first:]} == {last}
    assert {*written[:first]} == {f"b/x/step-4/rank-{rank}.safetensors" for rank in (0, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [1, 400])
def test_a_connection_that_is_cut_in_the_middle(store: stores.Store, tmp_path: Path, cuts: int) -> None:
    """Once, the library sends it again; for longer, the copy fails and is tried until it is there."""
    store.cuts = cuts
    made = copied("s3://b/x", path := checkpoint(tmp_path / "own", 4))
    if cuts > 1:
        assert made.trouble.startswith("the copy of step 4 failed: the mirror of the checkpoints cannot be written: ")
        assert "b/x/step-4/manifest.json" not in store.objects
        store.cuts = 0
        made.settle()
        assert [event[2] for event in made.metrics][-1] is True
    assert made.trouble == ""
    assert fetched("s3://b/x", 4, tmp_path / "new") == ""
    assert content(tmp_path / "new/step-4") == content(path)


def test_the_last_copy_is_tried_twice(store: stores.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.buckets.clear()
    made = Mirror("s3://b/x", Events(), keep=2)
    warned = made.metrics.write

    def write(*event: Any, **fields: Any) -> None:
        warned(*event, **fields)
        store.buckets.add("b")

    monkeypatch.setattr(made.metrics, "write", write)
    made.put(checkpoint(tmp_path, 4))
    made.settle()
    assert (made.trouble, made.metrics) == ("", [("mirror", 4, False), ("mirror", 4, True)])
    assert made.find(ELSEWHERE, required=True) == [4]


def test_a_store_that_deletes_nothing_has_the_copy_and_gets_it_once(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(Mirror, "_prune", refused)
    made = copied(place, checkpoint(tmp_path / "own", 4))
    assert made.trouble.startswith("older copies are not deleted: no permission: ")
    assert made.metrics == [("mirror", 4, True)]
    assert fetched(place, 4, tmp_path / "new") == ""


def test_a_copy_takes_the_place_of_what_was_there(place: str, tmp_path: Path) -> None:
    """As after a return to an older checkpoint: the same step is saved again, with other bytes."""
    copied(place, checkpoint(tmp_path / "before", 4))
    made = copied(place, path := checkpoint(tmp_path / "own", 4))
    assert made.trouble == ""
    assert fetched(place, 4, tmp_path / "new") == ""
    assert content(tmp_path / "new/step-4") == content(path)


def test_a_newer_one_takes_the_place_of_one_that_waits(store: stores.Store, tmp_path: Path) -> None:
    paths = [checkpoint(tmp_path, step) for step in (2, 4, 6)]
    made = Mirror("s3://b/x", Events(), keep=9)
    for path in paths:
        made.put(path)
    made.settle()
    assert made.find(ELSEWHERE, required=True)[-1] == 6


def test_what_is_copied_or_waits_for_it_may_not_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = Event(), Event()
    monkeypatch.setattr(Mirror, "_copy", lambda *_: (begun.set(), may_end.wait(60)))
    paths = [tmp_path / f"step-{step}" for step in (2, 4, 6)]
    made = Mirror(str(tmp_path / "mirror"), Events(), keep=9)
    made.put(paths[0])
    assert begun.wait(60)
    made.put(paths[1])
    assert [made.needs(path) for path in paths] == [True, True, False]
    made.put(paths[2])
    assert [made.needs(path) for path in paths] == [True, False, True]
    may_end.set()
    made.settle()
    assert not any(map(made.needs, paths))


def test_a_checkpoint_is_needed_also_between_its_wait_and_its_copy(tmp_path: Path) -> None:
    taken, asked = Event(), Event()

    class Waiting(deque[Path]):
        def pop(self) -> Path:  # type: ignore[override]
            path = super().pop()
            taken.set()
            asked.wait(0.5)  # as long as it is locked, the answer has to wait
            return path

    path = checkpoint(tmp_path / "own", 4)
    made = Mirror(str(tmp_path / "mirror"), Events(), keep=9)
    made._waiting = Waiting(maxlen=1)
    made.put(path)
    assert taken.wait(60)
    needed = made.needs(path)
    asked.set()
    assert needed
    made.settle()
    assert made.find(ELSEWHERE, required=True) == [4]


@pytest.mark.parametrize("harm", ["manifest", "names", "lost"])
def test_what_is_damaged_there_is_not_taken(store: stores.Store, tmp_path: Path, harm: str) -> None:
    """Bytes of tensors that differ are found afterwards, as in any checkpoint."""
    copied("s3://b/x", path := checkpoint(tmp_path / "own", 4))
    about = "b/x/step-4/manifest.json"
    if harm == "lost":
        del store.objects["b/x/step-4/rank-0.safetensors"]
    elif harm == "manifest":
        store.objects[about] = b"{"
    else:
        files = {**manifest.read(path)["files"], "../../planted": {"bytes": 1, "sha256": ""}}
        (path / manifest.NAME).unlink()
        manifest.write(path, {"files": files})
        store.objects[about] = (path / manifest.NAME).read_bytes()
    assert fetched("s3://b/x", 4, tmp_path / "new")
    assert not (tmp_path / "planted").exists()


def test_a_full_disk_here_is_not_the_mirror_s_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied("s3://b/x", checkpoint(tmp_path / "own", 4))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnfitError, match="a checkpoint of the mirror cannot be written"):
        fetched("s3://b/x", 4, tmp_path / "new")


def test_a_long_file_moves_a_block_at_a_time(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the copy of a large file would be taken for a hang."""
    sizes: list[int] = []
    monkeypatch.setattr(manifest, "BLOCK", 400)
    monkeypatch.setattr(Moved, "count", lambda _, size: sizes.append(size))
    path = checkpoint(tmp_path / "own", 4)
    copied(place, path)
    assert sizes.count(400) >= 4
    sizes.clear()
    assert fetched(place, 4, tmp_path / "new") == ""
    assert sum(sizes) == sum(file.stat().st_size for file in path.iterdir())


def test_a_folder_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    copied(str(tmp_path / "far"), checkpoint(tmp_path / "own", 4))
    (tmp_path / "far/step-4").chmod(0o777)
    assert fetched(str(tmp_path / "far"), 4, tmp_path / "new").startswith("the checkpoint is open to other users")


def test_a_umask_that_lets_a_group_write_does_not_count(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        copied(str(tmp_path / "far"), checkpoint(tmp_path / "own", 4))
    finally:
        os.umask(before)
    assert fetched(str(tmp_path / "far"), 4, tmp_path / "new") == ""


@pytest.mark.parametrize(
    ("place", "code", "problem"),
    [
        ("s3://none/x", 78, "the mirror of the checkpoints does not exist"),
        ("s3://nobody/x", 78, "no permission: the mirror of the checkpoints cannot be read"),
    ],
)
def test_a_mirror_that_cannot_be(place: str, code: int, problem: str) -> None:
    """A run that has nothing else does not begin from nothing; one with a checkpoint of its own goes on with that."""
    with pytest.raises(DrayError) as error:
        Mirror(place, Events(), keep=2).find(ELSEWHERE, required=True)
    assert (error.value.finding.code, error.value.problem) == (code, problem)
    made = Mirror(place, Events(), keep=2)
    assert made.find(ELSEWHERE, required=False) == []
    assert made.trouble.startswith(problem)


def test_a_mirror_that_does_not_answer_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    stores.forget()
    with pytest.raises(DrayError) as error:
        Mirror("s3://b/x", Events(), keep=2).find(ELSEWHERE, required=True)
    assert error.value.finding.code == 75


def test_a_run_with_its_own_checkpoint_goes_on_where_the_mirrors_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(str(tmp_path / "far"), checkpoint(tmp_path / "own", 4))

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(manifest, "require_own", stale)
    monkeypatch.setattr(Mirror, "_list", stale)
    made = Mirror(str(tmp_path / "far"), Events(), keep=2)
    assert made.find(tmp_path / "own", required=False) == []
    assert made.trouble.startswith("the mirror of the checkpoints cannot be read: ")
    with pytest.raises(DrayError) as error:
        made.find(tmp_path / "own", required=True)
    assert error.value.finding.code == 75


def test_the_checkpoint_folder_is_no_mirror_of_itself(tmp_path: Path) -> None:
    """By whatever name: a copy begins with the removal of the manifest there."""
    checkpoint(tmp_path / "own", 4)
    (tmp_path / "name").symlink_to(tmp_path / "own")
    for place in ("own", "own/", "name", "own/../own"):
        with pytest.raises(DrayError, match=r"checkpoint\.mirror is the checkpoint folder itself"):
            Mirror(f"{tmp_path}/{place}", Events(), keep=2).find(tmp_path / "own", required=False)


def test_a_place_that_is_the_checkpoint_folder_or_open_to_others_later_gets_no_copy(tmp_path: Path) -> None:
    path, place = checkpoint(tmp_path / "own", 4), tmp_path / "far"
    made = Mirror(str(place), Events(), keep=2)
    assert made.find(tmp_path / "own", required=False) == []
    place.symlink_to(tmp_path / "own")
    made.put(path)
    made.settle()
    assert "checkpoint.mirror is the checkpoint folder itself" in made.trouble
    assert manifest.damage(path, manifest.read(path)) == []
    place.unlink()
    place.mkdir()
    place.chmod(0o777)
    made.put(path)
    made.settle()
    assert "the checkpoint is open to other users" in made.trouble
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_place_where_others_may_write_is_refused_before_the_first_step(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "far"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(DrayError, match="the checkpoint is open to other users") as refused:
        Mirror(str(place), Events(), keep=2).find(ELSEWHERE, required=False)
    assert refused.value.finding.code == 78


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "far").write_text("")
    with pytest.raises(DrayError, match="the checkpoint is open to other users") as refused:
        Mirror(str(tmp_path / "far"), Events(), keep=2).find(ELSEWHERE, required=False)
    assert refused.value.finding.code == 78


def of_ranks(folder: Path, step: int, count: int) -> Path:
    path = folder / f"step-{step}"
    path.mkdir(mode=0o755, parents=True)
    names = [f"rank-{rank}.safetensors" for rank in range(count)]
    files = {name: manifest.write_file(path / name, os.urandom(100)) for name in names}
    manifest.write(path, {"version": 3, "step": step, "files": files})
    return path


def fetch(place: str, tmp_path: Path, count: int) -> list[Any]:
    part = tmp_path / "new/step-4"
    part.mkdir(mode=0o755, parents=True)
    return World(count).each(lambda _: Mirror(place, Events(), keep=2).fetch(part, "step-4", required=False))


def test_ranks_fetch_a_share_each(place: str, store: stores.Store, tmp_path: Path) -> None:
    copied(place, path := of_ranks(tmp_path / "own", 4, 7))
    store.asked.clear()
    assert fetch(place, tmp_path, 3) == [""] * 3
    assert content(tmp_path / "new/step-4") == content(path)
    read = [name for verb, name in store.asked if verb == "GET" and name.endswith(("json", "tensors"))]
    assert len(read) == len({*read})  # none twice


def test_what_one_rank_cannot_fetch_no_rank_takes(store: stores.Store, tmp_path: Path) -> None:
    copied("s3://b/x", of_ranks(tmp_path / "own", 4, 7))
    del store.objects["b/x/step-4/rank-4.safetensors"]
    (trouble,) = {*fetch("s3://b/x", tmp_path, 3)}
    assert trouble == "it lacks rank-4.safetensors"
