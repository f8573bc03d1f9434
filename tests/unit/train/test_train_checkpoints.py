"""A checkpoint's files: any ranks read what any others wrote, and what was damaged is refused unread."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.contract.findings import ConfigError, DrayError  # noqa: E402
from dray.train.checkpoint import manifest, shards, staging  # noqa: E402
from dray.train.checkpoint.shards import MismatchError, Shard, Shards, open_checkpoint  # noqa: E402
from dray.train.checkpoint.staging import Staging  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.hostile("checkpoints")]
MADE_BY = {"run": "one", "image_sha256": "", "dray": "0"}


def tensors() -> dict[str, torch.Tensor]:
    """Of several types, one without dimensions, one without numbers and one that is no row in memory."""
    torch.manual_seed(1)
    return {
        "weights.a": torch.randn(7, 3),
        "weights.b": torch.randn(5).bfloat16(),
        "weights.turned": torch.randn(4, 6).T,
        "others.scalar": torch.tensor(41),
        "others.none": torch.empty(0, 3),
        "others.mask": torch.tensor([True, False, True]),
    }


def whole(named: dict[str, torch.Tensor]) -> Shards:
    return {name: Shard(tuple(tensor.shape), 0, tensor) for name, tensor in named.items()}


def rows(named: dict[str, torch.Tensor], rank: int, count: int) -> Shards:
    """As FSDP has them: of 5 rows on 4 ranks the last has none."""
    found = {}
    for name, tensor in named.items():
        if tensor.dim() == 0:
            found |= {name: Shard((), 0, tensor)} if rank == 0 else {}
            continue
        each, width = -(-len(tensor) // count), tensor[:1].numel()
        begin = min(each * rank, len(tensor))
        found[name] = Shard(tuple(tensor.shape), begin * width, tensor[begin : begin + each])
    return found


WAYS: dict[str, Callable[[dict[str, torch.Tensor], int, int], Shards]] = {
    "ddp": lambda named, rank, count: shards.divided(whole(named), rank, count),
    "fsdp": rows,
}


def write(folder: Path, way: str, count: int) -> None:
    """A checkpoint of step 3, of so many ranks."""
    folder.mkdir(mode=0o755, parents=True)
    ranks = (
        {**WAYS[way](tensors(), rank, count), **shards.position_shards([[rank, rank, 2, [7]]])} for rank in range(count)
    )
    about = {"step": 3, "updates": 3, "world_size": count, "scaler": None, "order": {}} | MADE_BY
    staging.write(folder, ranks, about)


@pytest.mark.parametrize(("way", "count"), [("ddp", 1), ("ddp", 3), ("fsdp", 4), ("ddp", 60)])
@pytest.mark.parametrize(("then", "others"), [("ddp", 2), ("fsdp", 3)])
def test_any_ranks_read_what_any_wrote(tmp_path: Path, way: str, count: int, then: str, others: int) -> None:
    folder = tmp_path / "step-3"
    write(folder, way, count)
    reader = open_checkpoint(folder)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    for rank in range(others):
        reader.fill(WAYS[then](read, rank, others))
    reader.fill(whole({"weights.turned": read["weights.turned"]}))  # a reader's own order in memory
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors().items())
    wide = {"weights.b": torch.zeros(5)}
    reader.fill(whole(wide))
    assert torch.equal(wide["weights.b"], tensors()["weights.b"].float())


def test_positions_are_those_of_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "step-3"
    write(folder, "ddp", 3)
    feed = shards.Positions(folder, manifest.read_checkpoint(folder)["tensors"])
    read = {number: [*feed[number][:3], [*feed[number][3]]] for number in feed}
    assert read == {rank: [rank, rank, 2, [7]] for rank in range(3)}
    assert (3 in feed, len(feed)) == (False, 3)


def rows_of(ranks: int, *, shape: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    begins = [sum(lengths[:rank]) for rank in range(ranks)]
    own = (
        {"dtype": "F32", "shape": shape, "shards": [[rank, begins[rank], lengths[rank], 1]]} for rank in range(ranks)
    )
    return [{"files": {}, "tensors": {"weights.a": one}} for one in own]


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([4] * 8, [[0, 0, 4, 8]]),
        ([4] * 7 + [2], [[0, 0, 4, 7], [7, 28, 2, 1]]),
        ([4, 3, 4, 3], [[0, 0, 4, 1], [1, 4, 3, 1], [2, 7, 4, 1], [3, 11, 3, 1]]),
        ([3, 4, 4, 3], [[0, 0, 3, 1], [1, 3, 4, 2], [3, 11, 3, 1]]),
    ],
)
def test_equal_shards_of_ranks_in_a_row_are_one_row_however_they_meet(lengths: list[int], wanted: list[Any]) -> None:
    own = [rows_of(len(lengths), shape=[sum(lengths)], lengths=lengths) for _ in range(2)]
    one_by_one = functools.reduce(shards.join, own[0])
    by_twos = own[1]
    while len(by_twos) > 1:
        by_twos = [functools.reduce(shards.join, by_twos[place : place + 2]) for place in range(0, len(by_twos), 2)]
    assert one_by_one == by_twos[0]
    assert one_by_one["tensors"]["weights.a"]["shards"] == wanted


def test_shards_that_came_in_another_order_are_one_row_too() -> None:
    ranks = rows_of(4, shape=[16], lengths=[4] * 4)
    found = functools.reduce(shards.join, [ranks[place] for place in (2, 0, 3, 1)])
    assert found["tensors"]["weights.a"]["shards"] == [[0, 0, 4, 4]]


def test_ranks_of_a_whole_model_write_as_much_as_one_another() -> None:
    sizes = [sum(one.values.numel() for one in WAYS["ddp"](tensors(), rank, 3).values()) for rank in range(3)]
    assert sizes == [18, 18, 18]


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("weights.c", torch.zeros(1), "weights.c is missing"),
        ("weights.a", torch.zeros(3, 7), "weights.a has the shape [7, 3], not [3, 7]"),
    ],
)
def test_another_model_is_told(tmp_path: Path, name: str, tensor: torch.Tensor, said: str) -> None:
    write(tmp_path / "step-3", "ddp", 1)
    with pytest.raises(MismatchError) as refused:
        open_checkpoint(tmp_path / "step-3").fill(whole({name: tensor}))
    assert str(refused.value) == said


NUMBERS = "rank-0.safetensors"


def refused(folder: Path) -> str:
    with pytest.raises(DrayError) as error:
        open_checkpoint(folder)
    assert error.value.problem == "the checkpoint is incomplete"
    return error.value.finding.found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000, "its manifest cannot be read"),
        ("[]", "its manifest is not what was written"),
        ("{", "its manifest cannot be read"),
        ("\x00", "its manifest cannot be read"),
        ('{"version": 3, "files": {}}', "its manifest is not what was written"),
    ],
)
def test_what_is_no_manifest(tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path / "step-3", "ddp", 1)
    (tmp_path / "step-3" / "manifest.json").write_text(text)
    assert said in refused(tmp_path / "step-3")


def rewrite(folder: Path, **changed: Any) -> None:
    """As somebody writes it who knows the seal."""
    found = {**manifest.read(folder), **changed}
    (folder / "manifest.json").unlink()
    manifest.write(folder, found)


def test_another_version_is_refused_and_not_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "step-3"
    write(folder, "ddp", 1)
    rewrite(folder, version=4)
    with pytest.raises(ConfigError, match="the checkpoint was written by another version of dray") as error:
        open_checkpoint(folder)
    assert error.value.finding.code == 78
    assert error.value.finding.found == "checkpoint version 4, written by dray 0"


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x"])
def test_files_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "step-3"
    write(folder, "ddp", 1)
    rewrite(folder, files={name: {"bytes": 0, "sha256": ""}})
    assert refused(folder) == f"its manifest is not what was written in {folder}"


def test_a_byte_of_the_manifest_that_a_disk_has_changed(tmp_path: Path) -> None:
    """Whatever it says then: no other step, order, file or number is believed."""
    folder = tmp_path / "step-3"
    write(folder, "fsdp", 3)
    whole, data = manifest.read_checkpoint(folder), (folder / "manifest.json").read_bytes()
    changed = 0
    for place in range(0, len(data), 3):
        (folder / "manifest.json").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        found = manifest.read_checkpoint(folder)
        changed += "trouble" in found
        assert "trouble" in found or found == whole
    assert changed > len(data) / 4


@pytest.mark.parametrize("kind", ["link", "fifo", "lost", "flip", "cut"])
def test_a_file_that_is_not_what_was_written(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "step-3"
    write(folder, "ddp", 1)
    file, data = folder / NUMBERS, (folder / NUMBERS).read_bytes()
    file.unlink()
    (tmp_path / "elsewhere").write_bytes(data)
    if kind == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind != "lost":
        file.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if kind == "flip" else b""))
        file.chmod(0o644)
    assert NUMBERS in refused(folder)


def another_users(path: Path) -> str:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 4242, -1)
    return f"of user 4242, mode {path.stat().st_mode & 0o777:04o}"


def group_may_write(path: Path) -> str:
    path.chmod(0o775)
    return "that others may write, mode 0775"


@pytest.mark.parametrize("harm", [another_users, group_may_write])
@pytest.mark.parametrize("part", ["", "manifest.json", NUMBERS])
def test_what_others_may_write_is_refused(tmp_path: Path, harm: Callable[[Path], str], part: str) -> None:
    folder = tmp_path / "step-3"
    write(folder, "ddp", 1)
    found = harm(folder / part)
    with pytest.raises(ConfigError) as error:
        open_checkpoint(folder)
    path, kind = folder / part, "file" if part else "folder"
    assert str(error.value) == (
        "the checkpoint is open to other users\n"
        f"  where:  {path}\n  wanted: owned by user {os.geteuid()}, and writable by no other user\n"
        f"  found:  a {kind} {found}\n"
        f"  fix:    if only you have written it: chmod -R go-w '{folder}'; else set another "
        "checkpoint.folder"
    )


def test_a_umask_that_lets_a_group_write_does_not_count(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        write(tmp_path / "step-3", "ddp", 1)
    finally:
        os.umask(before)
    assert open_checkpoint(tmp_path / "step-3").tensors


MODEL = {"config.json": "{}", "model.safetensors": "numbers", "parts/x.jinja": "x", "c++ ä.json": "{}"}


@pytest.fixture
def final(tmp_path: Path) -> Path:
    folder = tmp_path / "final"
    for name, text in MODEL.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    manifest.seal_model(folder)
    (folder / "README.md").write_text("a card")
    manifest.check_model(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", '{"auto_map": 1}', "config.json is not what was written"),
        ("model.safetensors", "Numbers", "model.safetensors is not what was written"),
        ("model.safetensors", None, "model.safetensors: No such file or directory"),
        ("modeling.py", "print(1)", "modeling.py was added"),
        ("parts/adapter_config.json", "{}", "parts/adapter_config.json was added"),
        ("manifest.json", "{}", "its manifest is not what was written"),
        ("manifest.json", None, "its manifest cannot be read"),
    ],
)
def test_a_final_model_is_as_its_run_wrote_it(final: Path, name: str, text: str | None, said: str) -> None:
    if text is None:
        (final / name).unlink()
    else:
        (final / name).write_text(text)
    with pytest.raises(DrayError, match="the model's files differ from those that its run wrote") as error:
        manifest.check_model(final)
    assert (error.value.finding.code, error.value.finding.where) == (78, str(final))
    assert said in error.value.finding.found


def test_a_model_of_somebody_else_needs_no_manifest(final: Path) -> None:
    (final / "manifest.json").unlink()
    manifest.check_model(final, required=False)
    manifest.seal_model(final)
    (final / "model.safetensors").write_text("Numbers")
    manifest.check_model(final, weights=False)
    with pytest.raises(DrayError):
        manifest.check_model(final, required=False)


class Cudart:
    """CUDA's registered memory: size by address."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.registered, self.most = error, {}, 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802  CUDA's names
        assert address % 4096 == flags == 0
        if not self.error:
            self.registered[address] = size
            self.most = max(self.most, sum(self.registered.values()))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def beside_a_gpu(monkeypatch: pytest.MonkeyPatch, cudart: Cudart) -> Staging:
    """Its stream and its events do nothing."""
    held = SimpleNamespace(wait_stream=lambda _: None, record=lambda _: None, synchronize=lambda: None)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: held)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return Staging(torch.device("cuda"))


def test_pinned_memory_is_little_more_than_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken once; a stream's positions may grow. A larger buffer comes after the smaller one is given back."""
    cudart = Cudart()
    staging = beside_a_gpu(monkeypatch, cudart)
    weights = whole({"w": torch.arange(5000.0)})
    staging.reserve(weights)
    ((address, size),) = cudart.registered.items()
    assert size == 20000 + 20000 // 64
    grown = {**weights, "feed.0": Shard((30,), 0, torch.arange(30))}
    staged = staging.fill(grown, 0)
    assert cudart.registered == {address: size}
    assert staged.numbers.tobytes() == torch.arange(30).numpy().tobytes() + torch.arange(5000.0).numpy().tobytes()
    del staged
    staging.fill(whole({"w": torch.arange(9000.0)}), 0)
    assert list(cudart.registered.values()) == [36000 + 36000 // 64]
    assert cudart.most == 36000 + 36000 // 64
    staging.close()
    assert not cudart.registered
    staging.close()


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on, and the log has the reason; CUDA's own last error is taken away."""
    staging, cleared = beside_a_gpu(monkeypatch, Cudart(error=801)), []

    def zeros(*size: int, device: torch.device) -> torch.Tensor:
        cleared.append(device)
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch, "zeros", zeros)
    weights = {"weights.w": Shard((5000,), 0, torch.arange(5000.0))}
    staged = staging.fill(weights, 0)
    assert staged.numbers.tobytes() == torch.arange(5000.0).numpy().tobytes()
    assert cleared == [torch.device("cuda")]
    assert "not pinned, so each waits for its copy of 0.00 GB: cudaHostRegister returns error 801" in (
        "".join(capsys.readouterr())
    )
    staging.close()
