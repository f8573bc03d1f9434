"""What rank 0 writes into metrics.jsonl, without a run around it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.train.metrics import Metrics

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
