"""Checkpoints of before, which torch's DCP wrote: their index is a pickle, of which nothing is run here."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from dray.contract.findings import ConfigError
from dray.train import positions, saved
from dray.train.pickles import Distributed
from dray.train.shards import Shard


def convert(old: Path, new: Path, found: dict[str, Any]) -> None:
    """Write the same as one rank's checkpoint, whose manifest begins with `found`; a tensor at a time is in memory."""
    try:
        tensors = Distributed(old, found["files"].keys())
        scaler, feed = positions.of_ranks(old, found["world_size"])
        read = ((name, tensors.read(name)) for name in tensors)
        whole = ({name: Shard(tuple(one.shape), 0, one)} for name, one in read)
        saved.write(new, chain(whole, [positions.shards([*feed.values()])]), {**found, "scaler": scaler})
    except Exception as error:  # whatever a crafted pickle makes of its reader
        raise ConfigError(
            "the checkpoint of an older dray cannot be read",
            where=old,
            wanted="files as torch.distributed.checkpoint writes them",
            found=" ".join(f"{type(error).__name__}: {error}".split())[:300],
            fix="remove this folder to resume from an earlier checkpoint, or set another checkpoint.folder",
        ) from error
