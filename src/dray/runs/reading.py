"""Goes: its names are in runs/store.py."""

from __future__ import annotations

from dray.runs.store import *  # noqa: F403
from dray.runs.store import read_json

RECORD = 1 << 20
table = read_json
