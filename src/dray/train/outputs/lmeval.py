"""A saved model on tasks of lm-eval, by lm-eval's own command."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from dray.contract.findings import ConfigError
from dray.contract.trainer.image_tasks import LmEval
from dray.train import errors
from dray.train.checkpoint import manifest


def run(job: LmEval) -> None:
    """Print lm-eval's table, and write its results into the working folder."""
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "--tasks needs lm-eval, which this Python does not have",
            where=sys.executable,
            wanted="an image with a layer that has lm-eval, or an environment that has it",
            fix="pip wheel --no-deps --wheel-dir wheels sqlitedict word2number\n"
            f"dray image layer {job.variant} --pip lm-eval --wheels wheels --name lm-eval\n"
            "the same command with --engine apptainer layer=lm-eval; without an image: pip install lm-eval",
        )
    manifest.check_model(Path(job.model))
    on_gpu = job.variant != "cpu" and torch.cuda.is_available()
    model = {
        "pretrained": job.model,
        "dtype": "auto",
        "trust_remote_code": job.trust_remote_code,
        "parallelize": job.device_map,
    }
    sys.argv = [
        *("lm_eval", "run", "--model", "hf", "--model_args", json.dumps(model), "--tasks", job.tasks),
        *("--device", "cuda:0" if on_gpu else "cpu", "--batch_size", str(job.per_device if on_gpu else 1)),
        *("--output_path", "results.json", *job.options),
    ]
    command = import_module("lm_eval.__main__").cli_evaluate
    with errors.refusing(
        "lm-eval cannot evaluate this",
        where=f"--tasks {job.tasks}",
        wanted="tasks that `lm-eval ls tasks` lists, with their data in HF_HOME",
        fix="correct the tasks or options; where the hub can be reached, env.HF_HUB_OFFLINE=0 downloads the data",
    ):
        try:
            command()
        except SystemExit as ended:
            if ended.code:
                raise ValueError("options that it refuses, as it says above") from ended
