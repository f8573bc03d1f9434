"""Over how many nodes fsdp shards a model: the plan tells it before the trainer, with the GPU at hand, decides it."""

from __future__ import annotations

SHARE = 0.25
"""Of a rank's memory, for weights, gradients and optimizer: activations, and what libraries take, have the rest."""


def nodes_of(asked: str | int, nodes: int) -> list[int]:
    """How many nodes may share a shard, from the fastest to those that take least; the others have copies.

    Groups are of nodes that follow one another, and equally large.
    """
    if asked == "all":
        return [nodes]
    if asked != "auto":
        return [1 if asked == "node" else int(asked)]
    return [count for count in range(1, nodes + 1) if nodes % count == 0]


def text(ranks: int, nodes: int, of: int) -> str:
    """Who shares, `nodes` of `of`, `ranks` in all."""
    if nodes == of:
        return "all ranks"
    return "the ranks of each node" if nodes == 1 else f"the {ranks} ranks of every {nodes} nodes"
