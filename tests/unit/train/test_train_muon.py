"""Muon is torch's: the same updates of the same gradients, on any shape."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import torch.distributed as dist  # noqa: E402

from dray.train.parallel.optimizer import Muon  # noqa: E402
from trainings import config  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")]


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(8, 8), (12, 4), (4, 12), (1, 6)])
def test_it_steps_as_torch_s(tmp_path: Path, shape: tuple[int, int]) -> None:
    chosen = config(tmp_path, "train.optimizer=muon", "train.lr=0.02", "train.weight_decay=0.1")
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    muon = Muon({ours: ours.shape}, chosen, None)
    muon.state[ours]["momentum_buffer"] = torch.zeros_like(ours)
    muon.grad_scale = torch.tensor(4.0)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(shape)
        ours.grad, theirs.grad = gradient * 4, gradient
        muon.step()
        reference.step()
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    muon = Muon({weight: weight.shape}, config(tmp_path, "train.optimizer=muon", "train.weight_decay=0.1"), None)
    muon.state[weight]["momentum_buffer"] = torch.full((4, 4), 0.5)
    muon.grad_scale, muon.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    weight.grad = torch.full((4, 4), torch.nan)
    muon.step()
    assert torch.equal(weight, torch.ones(4, 4))
    assert torch.equal(muon.state[weight]["momentum_buffer"], torch.full((4, 4), 0.5))
