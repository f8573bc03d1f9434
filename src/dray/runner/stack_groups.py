"""Groups hung ranks by identical stack: each node sends each of its stacks once, however many of its ranks share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dray.contract import cores
from dray.contract.hostnames import compress
from dray.runner.culprit import Entered, Seen

_ENTERED = 64  # collectives of one kind of ranks, in seen.jsonl


class StackGroups:
    """What was seen of this node's ranks; on the first node, of all ranks."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}

    def add(self, seen: Seen) -> None:
        """Add what this node has seen of one of its ranks."""
        self._seen[seen.rank] = seen

    def messages(self) -> list[dict[str, Any]]:
        """A message for each group of ranks that do the same."""
        groups: dict[Seen, list[int]] = {}
        for seen in self._seen.values():
            groups.setdefault(seen._replace(rank=0), []).append(seen.rank)
        return [{"seen": seen._asdict(), "ranks": sorted(ranks)} for seen, ranks in groups.items()]

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take such a message of another node."""
        fields = message["seen"]
        flight = tuple(Entered(*entered) for entered in fields["flight"])
        seen = Seen(**{**fields, "frames": tuple(fields["frames"]), "flight": flight})
        self._seen |= {rank: seen._replace(rank=rank) for rank in message["ranks"]}

    def all(self, names: Mapping[int, str]) -> list[Seen]:
        """What was seen of each rank; `names` has the node of each."""
        return [self._seen.get(rank) or Seen(rank, node, state="unseen") for rank, node in names.items()]


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
