"""Groups hung ranks by identical stack: a node sends each of its stacks once, however many of its ranks share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from dray.contract import cores
from dray.contract.hostnames import compress
from dray.runner.culprit import Seen

_ENTERED = 64  # collectives of one kind of ranks, in seen.jsonl
Groups = tuple[tuple[Seen, list[int]], ...]


def grouped(ranks: Iterable[Seen]) -> Groups:
    """What was seen, each with the ranks that do the same."""
    groups: dict[Seen, list[int]] = {}
    for seen in ranks:
        groups.setdefault(seen._replace(rank=0), []).append(seen.rank)
    return tuple(groups.items())


def each(groups: Groups) -> dict[int, Seen]:
    """What was seen of each rank."""
    return {rank: seen._replace(rank=rank) for seen, ranks in groups for rank in ranks}


def lines(seen: Iterable[Seen]) -> Iterator[dict[str, Any]]:
    """The lines of seen.jsonl: groups of ranks that do the same, the smallest first, with their last collectives."""
    groups: dict[Seen, list[Seen]] = {}
    for one in seen:
        groups.setdefault(one._replace(rank=0, node="", flight=()), []).append(one)
    for group, ranks in sorted(groups.items(), key=lambda item: len(item[1])):
        entered = Counter(entry for one in ranks for entry in one.flight).most_common(_ENTERED)
        yield {
            "count": len(ranks),
            "ranks": cores.render(one.rank for one in ranks),
            "nodes": compress(one.node for one in ranks),
            **{name: value for name, value in group._asdict().items() if name not in ("rank", "node", "flight")},
            "flight": [{**entry._asdict(), "ranks": count} for entry, count in entered],
        }
