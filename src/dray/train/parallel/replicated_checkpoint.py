"""Ranks with the same numbers: each writes a part of a checkpoint; at a resume each reads a part for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dray.train.checkpoint.shards import Reader, Shards, divided, flattened
from dray.train.collectives import barrier

_READERS = 64  # more would send messages to all ranks, and not read much faster from one disk
_SENT = 1 << 28  # bytes at once


@dataclass(frozen=True)
class Replicas:
    """Which of them this rank is, of how many, and their group; None is that of all ranks."""

    rank: int
    count: int
    group: dist.ProcessGroup | None = None

    def part(self, shards: Shards) -> Shards:
        """Return what this rank writes."""
        return divided(shards, self.rank, self.count)

    def fill(self, shards: Shards, reader: Reader) -> None:
        """Some ranks read a part each, and send it to the others. All ranks of the run call it together."""
        reader.require(shards)  # on every rank, since a rank that read alone would fail alone
        parts = min(self.count, _READERS)
        readers = [part * self.count // parts for part in range(parts)]  # spread over the nodes
        with flattened(shards) as rows:
            if self.rank in readers:
                reader.fill(divided(rows, readers.index(self.rank), parts))
            if parts == 1:
                return
            barrier()  # a disk may need longer than ranks wait for one another in a collective of GPUs
            for part, rank in enumerate(readers):
                source = rank if self.group is None else dist.get_global_rank(self.group, rank)
                for shard in divided(rows, part, parts).values():
                    for sent in torch.split(shard.values.view(torch.uint8), _SENT):  # gloo knows no bool
                        dist.broadcast(sent, source, group=self.group)
