"""Where metrics go besides metrics.jsonl. A tracker is a class, a line in TRACKERS, and a value of train.trackers."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dray.contract.findings import ConfigError
from dray.train.config import Config

Numbers = dict[str, float]


class Tracker(Protocol):
    """Begins when it is made, with the attempt's folder."""

    def log(self, numbers: Numbers, step: int) -> None:
        """The numbers of one line."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoard:
    """Event files, which every run has."""

    def __init__(self, folder: Path, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  half a second, on the one rank that writes

        del config
        self._board: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, numbers: Numbers, step: int) -> None:
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self) -> None:
        self._board.close()


class Wandb:
    """Offline, unless WANDB_MODE says otherwise."""

    def __init__(self, folder: Path, config: Config) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        self._run = _imported("wandb").init(dir=str(folder), id=config.run, name=config.run, resume="allow")

    def log(self, numbers: Numbers, step: int) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A file in the run's folder, unless MLFLOW_TRACKING_URI says otherwise."""

    def __init__(self, folder: Path, config: Config) -> None:
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        self._mlflow = _imported("mlflow")
        self._mlflow.start_run(run_name=config.run)

    def log(self, numbers: Numbers, step: int) -> None:
        self._mlflow.log_metrics(numbers, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, Config], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}


def _imported(name: str) -> Any:  # noqa: ANN401  a module
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"train.trackers names {name}, which the image lacks",
            wanted=f"the Python package {name}",
            found=str(error),
            fix="add it to the image's requirements.in, or leave it out; TensorBoard's files are always written",
        ) from error
