"""What rank 0 measures and writes into metrics.jsonl, without a run around it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.train import metrics as module  # noqa: E402
from dray.train.metrics import Metrics, Speed  # noqa: E402

pytestmark = pytest.mark.torch
NAN, INF = float("nan"), float("inf")


def test_what_is_not_finite_is_null_also_in_a_list(tmp_path: Path) -> None:
    """A score of fp16 that overflows, which a run only observes."""
    config: Any = SimpleNamespace(folder=tmp_path, train=SimpleNamespace(trackers=()))
    told = {"loss": NAN, "attention_max": [1.5, INF, NAN], "shares": {"web": -INF, "code": 0.5}, "step": 7}
    metrics: Any = Metrics(config, writes=True)
    with metrics._file:
        metrics.write("step", "", **told)
    found = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert found.pop("time")
    assert found == {
        "event": "step", "loss": None, "attention_max": [1.5, None, None], "shares": {"web": None, "code": 0.5},
        "step": 7,
    }  # fmt: skip


def test_what_was_spent_before_a_run_went_back_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation fell between the last line and the loss that was not finite."""
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module, "flops_per_token", lambda *_: 1.0)
    config: Any = SimpleNamespace(step_tokens=1000, global_size=8, steps=100, train=SimpleNamespace(precision="bf16"))
    strategy: Any = SimpleNamespace(device=torch.device("cpu"), network=None)
    speed = Speed(config, strategy)
    speed.begin(0)
    with speed.spent("evaluation"):
        now = 60.0
    speed.begin(5)
    now = 62.0
    found = speed.measured(7)
    assert (found["tokens_per_s"], found["step_s"]) == (1000.0, 1.0)
