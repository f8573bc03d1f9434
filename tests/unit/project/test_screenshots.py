"""The pictures of a terminal, which `make screenshots` draws."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from rich.text import Text

import screenshots


def test_a_terminal_is_drawn_light_and_dark_and_fetches_nothing(tmp_path: Path) -> None:
    row = f"{'20261125-155946-smoke-cpu-b61059':<92}2026-11-25"
    screenshots.terminal("dray runs", Text(row), tmp_path / "runs")
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert sorted(drawn) == ["runs-dark.svg", "runs-light.svg"]
    assert drawn["runs-dark.svg"] != drawn["runs-light.svg"]
    for picture in drawn.values():
        lines = [
            text.text.replace("\xa0", " ").rstrip() for text in ElementTree.fromstring(picture).iter() if text.text
        ]
        assert [line for line in lines if line.startswith("20261125")] == [row]
        assert re.findall(r"url\((?!#)|@font-face|@import|href=", picture) == []
