"""Over how many nodes fsdp shards a model: the plan tells it before the trainer, with the GPU at hand, decides it."""

from __future__ import annotations

SHARE = 0.25
"""The share of a rank's memory for weights, gradients and optimizer; activations and libraries need the rest."""


def nodes_of(asked: str | int, nodes: int) -> list[int]:
    """How many nodes may share one copy of the model, from the fastest choice to the one with least memory.

    Groups are equally large, and their nodes follow one another.
    """
    if asked == "all":
        return [nodes]
    if asked != "auto":
        return [1 if asked == "node" else int(asked)]
    return [count for count in range(1, nodes + 1) if nodes % count == 0]


def text(ranks: int, nodes: int, of: int) -> str:
    """The ranks that share a copy: `ranks` ranks on `nodes` of `of` nodes."""
    if nodes == of:
        return "all ranks"
    return "the ranks of each node" if nodes == 1 else f"the {ranks} ranks of every {nodes} nodes"
