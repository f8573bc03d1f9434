"""`dray cluster exec -- dray VERB`: the verb runs in the image, as at a login node without Python."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest

from dray.cli import cluster as verbs


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (["dray", "submit", "a b.toml"], ["bash", "slurm/dray", "submit", "a b.toml"]),
        (["sinfo", "dray"], ["sinfo", "dray"]),
    ],
)
def test_dray_is_the_image_s(monkeypatch: pytest.MonkeyPatch, command: list[str], argv: list[str]) -> None:
    asked: list[Any] = []

    def run(self: object, command: list[str], **_: object) -> SimpleNamespace:
        asked.extend(command)
        return SimpleNamespace(code=3)

    monkeypatch.setattr(verbs, "client", StringIO)
    monkeypatch.setattr(verbs.LocalCluster, "exec", run)
    assert (verbs.exec_(command), asked) == (3, argv)
