"""One rank of the preflight: who it is, and the word it leaves of how far it came."""

from __future__ import annotations

import faulthandler
import json
import os
import time
from pathlib import Path
from typing import Any

from dray.contract import exit_codes
from dray.contract.findings import Finding


class Wrong(Exception):  # noqa: N818  it is what was found
    """What does not hold, and what would mend it."""

    def __init__(self, why: str, *, wanted: str, found: str, fix: str, node: str = "", rank: int | None = None) -> None:
        finding = Finding(why, wanted=wanted, found=found, fix=fix, code=exit_codes.UNFIT, node=node, rank=rank)
        self.said = finding._asdict()
        super().__init__(why)


class Rank:
    """This rank: who it is, and the word it leaves."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.number, self.size = plan, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = Path(plan["folder"], "preflight")
        self.began = time.monotonic()
        self.limit = 0
        self.seconds: dict[str, float] = {}
        self._phase = ""
        self._stack = (self.folder / f"rank-{self.number}.stack").open("w", encoding="utf-8")

    def deadline(self, seconds: int) -> None:
        """From now on; whoever can still do so writes where it stands, and ends."""
        self.limit = seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stack)

    def node_of(self, rank: int) -> str:
        """The name of a rank's node."""
        return str(self.plan["world"]["nodes"][rank // self.plan["world"]["ranks_per_node"]]["name"])

    def phase(self, name: str) -> None:
        """The next part begins."""
        now = time.monotonic()
        if self._phase:
            self.seconds[self._phase] = round(now - self.began, 2)
        self.began, self._phase = now, name
        self.tell()

    def tell(self, **more: object) -> None:
        """preflight/rank-N.json, whole or as it was."""
        said: dict[str, object] = {"rank": self.number, "node": self.node_of(self.number), "phase": self._phase}
        said |= {"pid": os.getpid(), "time": time.time(), "limit": self.limit}
        path = self.folder / f"rank-{self.number}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps({**said, "order": len(self.seconds), **more}), encoding="utf-8")
        part.replace(path)
