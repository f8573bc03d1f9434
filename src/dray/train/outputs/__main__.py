"""`python -m dray.train.outputs JOB.json`: a job of contract/jobs.py. Each is a file of this folder, with `run`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from transformers.utils import logging

from dray.contract import jobs
from dray.train.errors import guarded


def main(path: str) -> None:
    """Import what the job needs, and no more."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    job = jobs.of_json(json.loads(Path(path).read_text(encoding="utf-8")))
    import_module(f"dray.train.outputs.{type(job).__name__.lower()}").run(job)


if __name__ == "__main__":
    guarded(main, sys.argv[1])
