"""A rendezvous of torchrun and accelerate over the runner's store, registered as `dray` (pyproject: torchrun.handlers).

torch's static one would build a store of its own on every interface; its c10d one unpickles what it reads from the
store, where anybody may write. The nodes have met already, and this one only says so. It never has ranks started again:
the runners do that, with a new store.
"""

from __future__ import annotations

import datetime
import os
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
    """The class of the handler; torch finds this function by its entry point in pyproject."""
    return StoreRendezvous


class StoreRendezvous(RendezvousHandler):
    """This agent's place, from variables that the runner has set."""

    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters = parameters
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._place = RendezvousStoreInfo(address, port)
        self._store = TCPStore(address, port, is_master=False, timeout=_TIMEOUT)

    def get_backend(self) -> str:
        """The name under which it is registered."""
        return "dray"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this agent's place at once; the agents' first exchange, which follows, waits for all of them."""
        node, nodes = int(os.environ["GROUP_RANK"]), self._parameters.max_nodes
        return RendezvousInfo(PrefixStore("dray", self._store), node, nodes, self._place)

    def num_nodes_waiting(self) -> int:
        """Return 0: more would make this agent start its ranks again."""
        return 0

    def is_closed(self) -> bool:
        """Return False: the runners end the rendezvous."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def get_run_id(self) -> str:
        """torch's name for the run."""
        return str(self._parameters.run_id)

    def shutdown(self) -> bool:
        """Do nothing: the store ends with the runner."""
        return True
