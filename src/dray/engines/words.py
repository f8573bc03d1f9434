"""The words of an engine's command line."""

from __future__ import annotations


class OnNode(str):
    """Words that only the node knows, written as its own shell expands them; every other word is quoted."""

    __slots__ = ()


def each(array: str) -> OnNode:
    """All words of an array that the node's own script has filled."""
    return OnNode(f'"${{{array}[@]}}"')
