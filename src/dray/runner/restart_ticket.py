"""One start of all ranks: the run's first, or one after a failure, with a secret, a port and a store of its own."""

from __future__ import annotations

import hmac
import os
from typing import NamedTuple

_NONCE = 32


class RestartTicket(NamedTuple):
    """A start's number, nonce and port, which all nodes must know. They are not secret."""

    number: int = 0
    nonce: str = ""
    port: int = 0

    def key(self, secret: bytes) -> bytes:
        """The key by which a node proves that it belongs to this start; made with the run's secret."""
        if not self.number:
            return secret
        return hmac.digest(secret, f"dray restart {self.number} {self.nonce}".encode(), "sha256")

    def following(self, port: int) -> RestartTicket:
        """The next start, made by the first node."""
        return RestartTicket(self.number + 1, os.urandom(_NONCE).hex(), port)
