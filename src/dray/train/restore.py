"""A checkpoint that has been checked, back into the weights, the optimizer and the loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dray.contract.findings import ConfigError
from dray.train.positions import Positions
from dray.train.shards import MismatchError, Reader
from dray.train.strategies.base import Strategy


def check_order(own: dict[str, Any], path: Path, order: dict[str, Any]) -> None:
    """Refuse another batch, sequence length, seed or dataset: the order of samples would differ."""
    for name, value in own.items():
        if order.get(name) != value:
            raise ConfigError(
                "the data order differs from the checkpoint's",
                wanted=f"{name} = {order.get(name)}, as in {path}",
                found=f"{name} = {value}",
                fix="restore it, or start anew: another checkpoint.folder, and model.name = a final model's folder",
            )


def load(strategy: Strategy, path: Path, found: dict[str, Any]) -> Mapping[int, list[Any]]:
    """All ranks together; the positions of a stream's shards, whichever ranks wrote them."""
    if strategy.scaler and found.get("scaler"):
        strategy.scaler.load(found["scaler"])
    try:
        strategy.load(Reader(path, found["tensors"]), found["updates"])
    except MismatchError as error:
        raise ConfigError(
            "the checkpoint is of another model",
            wanted="the tensors of this recipe's model",
            found=f"in {path}: {error}",
            fix="set another checkpoint.folder, or use the recipe that made the checkpoint",
        ) from error
    return Positions(path, found["tensors"])
