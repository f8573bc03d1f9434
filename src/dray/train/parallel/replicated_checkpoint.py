"""Ranks that hold the same tensors: each writes a part of a checkpoint, and at a resume some read a part for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dray.train.checkpoint.shards import Reader, Shards, divided, flattened
from dray.train.collectives import barrier

_READERS = 64  # more readers cost more broadcasts, and hardly read faster from one disk
_SENT = 1 << 28  # bytes of one broadcast


@dataclass(frozen=True)
class Replicas:
    """This rank's number among ranks with the same tensors, their count, and their group; None: all ranks."""

    rank: int
    count: int
    group: dist.ProcessGroup | None = None

    def part(self, shards: Shards) -> Shards:
        """Return the part that this rank writes."""
        return divided(shards, self.rank, self.count)

    def fill(self, shards: Shards, reader: Reader) -> None:
        """Fill these shards: some ranks read a part each, and broadcast it. All ranks of the run call it together."""
        reader.require(shards)  # on every rank: a reader that failed alone would leave the others waiting
        parts = min(self.count, _READERS)
        readers = [part * self.count // parts for part in range(parts)]  # spread over the nodes
        with flattened(shards) as rows:
            if self.rank in readers:
                reader.fill(divided(rows, readers.index(self.rank), parts))
            if parts == 1:
                return
            barrier()  # reading may take longer than the timeout of a broadcast
            for part, rank in enumerate(readers):
                source = rank if self.group is None else dist.get_global_rank(self.group, rank)
                for shard in divided(rows, part, parts).values():
                    for sent in torch.split(shard.values.view(torch.uint8), _SENT):  # gloo knows no bool
                        dist.broadcast(sent, source, group=self.group)
