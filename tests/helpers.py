"""Where things are, and golden files."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"


def golden(name: str | Path, text: str) -> None:
    """Compare with a file of tests/golden, or any other; DRAY_GOLDEN=write writes it."""
    path = GOLDEN / name
    if os.environ.get("DRAY_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
