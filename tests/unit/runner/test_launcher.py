"""The plan's variables in the runner: which it sets, and what the node has handed in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dray.runner import launcher
from nodes import decoded, planned

PLAN = {
    "pass_env": ["HF_TOKEN", "ROCR_VISIBLE_DEVICES", "UNSET"],
    "env": [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "OMP_NUM_THREADS", "value": ""},
        {"name": "TMPDIR", "value": "/a b\n$c"},
        {"name": "HOME", "value": "/elsewhere"},
        {"name": "ROCR_VISIBLE_DEVICES", "value": "0"},
        {"name": "UNSET", "value": "the site's"},
        {"name": "PYTHONPATH", "value": "/the plan's"},
        {"name": "LD_LIBRARY_PATH", "value": "/the plan's"},
        {"name": "PATH", "value": "/the plan's"},
    ],
}


def test_the_plans_variables_win_over_the_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "7", "TMPDIR": "/tmp", "HOME": "/root", "KEPT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UNSET", raising=False)
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH")}
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "3")
    launcher.set_variables(decoded(planned(tmp_path) | PLAN))
    names = ("NCCL_DEBUG", "OMP_NUM_THREADS", "TMPDIR", "HOME", "KEPT", "UNSET")
    assert [os.environ[name] for name in names] == ["INFO", "", "/a b\n$c", "/elsewhere", "1", "the site's"]
    assert os.environ["ROCR_VISIBLE_DEVICES"] == "3"  # the job's own, by pass_env
    # node.sh has set these, and the engine may have added to them.
    assert {name: os.environ.get(name) for name in before} == before
    monkeypatch.delenv("UNSET")
