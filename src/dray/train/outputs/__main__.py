"""`python -m dray.train.outputs JOB.json`: a job of contract/trainer/image_tasks.py.

Each is a file of this folder, with `run`.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

from dray.contract.trainer import image_tasks
from dray.train.errors import guarded


def main(path: str) -> None:
    """Import what the job needs, and no more: a push needs no torch."""
    # Read by these libraries as they are imported.
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    job = image_tasks.of_json(json.loads(Path(path).read_text(encoding="utf-8")))
    import_module(f"dray.train.outputs.{type(job).__name__.lower()}").run(job)


if __name__ == "__main__":
    guarded(main, sys.argv[1], name="dray: ")  # the user sees what it prints
