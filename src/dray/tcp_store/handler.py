"""A rendezvous of torchrun and accelerate over the runner's store, registered as `dray` (pyproject: torchrun.handlers).

torch's static one would build a store of its own on every interface; its c10d one numbers the nodes as they come. The
nodes have met already, so this one only counts the agents in, again in each restart: then every agent starts its ranks
anew, in the same order, with a store of their own, since keys of the ranks before would be mistaken for theirs.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

_TIMEOUT = datetime.timedelta(minutes=10)  # a node whose agent fails ends the others sooner, through the runners


def creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torch registers under this module's name in pyproject."""
    return StoreRendezvous


class StoreRendezvous(RendezvousHandler):
    """Where this agent stands, by what the runner has put into the environment."""

    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._address, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._node, self._nodes = int(os.environ["GROUP_RANK"]), parameters.max_nodes
        self._run_id, self._restarts = parameters.run_id, parameters.get_as_int("restarts", 0)
        self._store = TCPStore(self._address, self._port, is_master=False, timeout=_TIMEOUT)
        self._round = 0
        self._of_ranks: TCPStore | None = None

    def get_backend(self) -> str:
        """As registered."""
        return "dray"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all agents have come to this start of the ranks."""
        agents = PrefixStore(f"dray/{self._round}", self._store)
        self._round += 1
        arrived = agents.add("arrived", 1)  # before anything that waits: the other agents follow when they see it
        port = self._port
        if self._round > 1:
            if self._node == 0:
                agents.set("port", str(self._serve()))
            port = int(agents.get("port"))
        if arrived == self._nodes:
            agents.set("all", "")
        agents.wait(["all"], _TIMEOUT)
        return RendezvousInfo(agents, self._node, self._nodes, RendezvousStoreInfo(self._address, port))

    def num_nodes_waiting(self) -> int:
        """More than 0 makes this agent start its ranks again, since another does."""
        return self._store.add(f"dray/{self._round}/arrived", 0) if self._restarts else 0

    def is_closed(self) -> bool:
        """Never: the runners end it."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def get_run_id(self) -> str:
        """torch's own name for the run."""
        return str(self._run_id)

    def shutdown(self) -> bool:
        """The store ends with the runner."""
        return True

    def _serve(self) -> int:
        """The store of ranks that are started again."""
        listener = socket.create_server((self._address, 0), backlog=4096)
        port = int(listener.getsockname()[1])
        self._of_ranks = TCPStore(
            self._address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port
