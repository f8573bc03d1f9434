"""TF32, deterministic algorithms and NCCL's device, as far as they show without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.contract.findings import ConfigError  # noqa: E402
from dray.train import collectives, errors  # noqa: E402
from dray.train.parallel import optimizer  # noqa: E402
from dray.train.runtime import numerics  # noqa: E402
from trainings import config  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def as_before():
    """These are torch's own, for the whole process."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("device", "words", "found"),
    [
        ("cuda", ("train.precision=fp32",), ("high", True, True)),
        ("cuda", ("train.precision=fp32", "train.tf32=false"), ("highest", False, False)),
        ("cuda", ("train.precision=bf16",), ("highest", False, False)),
        ("cuda", ("train.precision=fp16",), ("highest", False, False)),
        ("cpu", (), ("highest", False, True)),
    ],
)
def test_tf32(tmp_path: Path, device: str, words: tuple, found: tuple) -> None:
    """Inductor reads torch's old names and its new ones: all must be readable, and agree."""
    numerics.set_up(config(tmp_path, *words), torch.device(device))
    matmul = torch.backends.cuda.matmul
    assert (torch.get_float32_matmul_precision(), matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == found
    assert getattr(matmul, "fp32_precision", None) in (None, "tf32" if matmul.allow_tf32 else "ieee", "none")


def test_an_operation_that_is_not_deterministic_is_refused(tmp_path: Path) -> None:
    numerics.set_up(config(tmp_path, "train.deterministic=true"), torch.device("cpu"))
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == (True, False)
    with pytest.raises(RuntimeError) as refused:
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
    told = errors._known(refused.value)
    assert isinstance(told, ConfigError)
    assert str(told) == (
        "an operation of this model is not deterministic on this device\n"
        "  wanted: only deterministic operations, for train.deterministic = true\n"
        "  found:  put_ does not have a deterministic implementation\n"
        "  fix:    train.deterministic=false, or another model.attn_implementation"
    )
    assert errors._known(RuntimeError("else")) is None


def test_one_fused_adamw_is_that_of_all_strategies(tmp_path: Path) -> None:
    """DeepSpeed's stages had the one that takes a kernel for each tensor."""
    made = optimizer.adamw([torch.nn.Parameter(torch.zeros(2, 2))], config(tmp_path))
    assert made.defaults["fused"]
    room = Path(optimizer.__file__).parent
    assert [path.name for path in room.glob("*.py") if "torch.optim." in path.read_text()] == ["optimizer.py"]
    assert [path.stem for path in sorted(room.glob("*.py")) if "adamw([" in path.read_text()] == ["optimizer"]
    assert "= adamw(" in (room / "zero.py").read_text()


def test_nccl_knows_its_device_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it connects in the first collective, and guesses the device of a barrier."""
    calls: list[tuple] = []
    monkeypatch.setattr(collectives, "_control", None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    dist = SimpleNamespace(
        init_process_group=lambda backend, timeout, device_id: calls.append((backend, device_id)),
        new_group=lambda **_: "control",
        barrier=lambda group: calls.append(("barrier", group)),
    )
    monkeypatch.setattr(collectives, "dist", dist)
    monkeypatch.setattr(collectives, "_set_pg_timeout", lambda *_: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    device = collectives.init_distributed("cuda")
    assert calls == [("set_device", device), ("nccl", torch.device("cuda", 3)), ("barrier", "control")]
    collectives.init_distributed("cpu")
    assert calls[3:] == [("gloo", None), ("barrier", "control")]
