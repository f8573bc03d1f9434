"""Groups hung ranks by identical stack, so that the first node gets each stack once.

A node sends the first one its groups of ranks, each with the digest of its stack. The first node asks for the stacks
that it does not know. So 80,000 ranks that wait in one collective cost it 400 bytes a node, not 3 KB a rank.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dray.contract import cores
from dray.contract.hostnames import compress
from dray.runner.channel import BrokenError
from dray.runner.odd import Seen

_ASKED = 3  # nodes, for the same stack: one may be gone
_STACKS = 1000  # kept on the first node; where ranks are at more places than that, no stack tells anything
_LOST = ("<its stack is not known>",)
_GROUPS = 64  # collectives of one kind of ranks, in seen.jsonl


def _digest(frames: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(frames).encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Alike:
    """What was seen of this node's ranks; on the first node, of all ranks."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Seen, str]] = {}  # without its stack, and the digest of that
        self._frames: dict[str, tuple[str, ...]] = {}
        self._asked: Counter[str] = Counter()

    def add(self, seen: Seen) -> None:
        """Add what this node has seen of one of its ranks."""
        digest = _digest(seen.frames)
        self._frames[digest] = seen.frames
        self._seen[seen.rank] = seen._replace(frames=()), digest

    def told(self) -> list[dict[str, Any]]:
        """A message for each group of ranks that do the same."""
        kinds: dict[tuple[Seen, str], list[int]] = {}
        for seen, digest in self._seen.values():
            kinds.setdefault((seen._replace(rank=0), digest), []).append(seen.rank)
        return [
            {"seen": {**seen._asdict(), "rank": sorted(ranks), "frames": digest}}
            for (seen, digest), ranks in kinds.items()
        ]

    def hear(self, own: range, node: str, fields: Any) -> list[dict[str, Any]]:  # noqa: ANN401  any JSON value
        """Store a report of a node, whose ranks are `own`; return the request for its stack, if that is unknown."""
        if not isinstance(fields, dict) or not isinstance(ranks := fields.get("rank"), list):
            raise BrokenError("a malformed report of hung ranks")
        if not ranks or any(type(rank) is not int or rank not in own for rank in ranks):
            raise BrokenError("a report of another node's rank")
        digest = _known_digest(fields.get("frames"))
        seen = Seen.told({**fields, "rank": ranks[0], "node": node, "frames": ()})
        self._seen |= {rank: (seen._replace(rank=rank), digest) for rank in ranks}
        if digest in self._frames or self._asked[digest] >= _ASKED:
            return []
        if digest not in self._asked and len(self._asked) >= _STACKS:
            return []
        self._asked[digest] += 1
        return [{"tell": digest}]

    def tell(self, digest: Any) -> list[dict[str, Any]]:  # noqa: ANN401  any JSON value
        """Reply with the stack of this digest."""
        frames = self._frames.get(_known_digest(digest))
        return [] if frames is None else [{"stack": list(frames)}]

    def keep(self, frames: Any) -> None:  # noqa: ANN401  any JSON value
        """Store a stack that this node has asked for. BrokenError: it has not."""
        stack = Seen.told({"rank": 0, "frames": frames}).frames
        if (digest := _digest(stack)) not in self._asked:
            raise BrokenError("a stack that was not asked for")
        self._frames[digest] = stack

    @property
    def waits(self) -> bool:
        """Whether a requested stack is still missing."""
        return not self._asked.keys() <= self._frames.keys()

    def all(self, names: Mapping[int, str]) -> list[Seen]:
        """What was seen of each rank; `names` has the node of each."""
        found = []
        for rank, node in names.items():
            seen, digest = self._seen.get(rank) or (Seen(rank, node, state="unseen"), "")
            found.append(seen._replace(frames=self._frames.get(digest, _LOST if digest else ())))
        return found


def _known_digest(value: Any) -> str:  # noqa: ANN401  any JSON value
    if not isinstance(value, str) or len(value) != len(_digest(())):
        raise BrokenError("a malformed digest of a stack")
    return value


def lines(seen: Iterable[Seen]) -> Iterator[dict[str, Any]]:
    """The lines of seen.jsonl: groups of ranks that do the same, the smallest first, with their last collectives."""
    kinds: dict[Seen, list[Seen]] = {}
    for one in seen:
        kinds.setdefault(one._replace(rank=0, node="", flight=()), []).append(one)
    for kind, ranks in sorted(kinds.items(), key=lambda item: len(item[1])):
        entered = Counter(entry for one in ranks for entry in one.flight).most_common(_GROUPS)
        yield {
            "count": len(ranks),
            "ranks": cores.render(one.rank for one in ranks),
            "nodes": compress(one.node for one in ranks),
            **{name: value for name, value in kind._asdict().items() if name not in ("rank", "node", "flight")},
            "flight": [{**entry._asdict(), "ranks": count} for entry, count in entered],
        }
