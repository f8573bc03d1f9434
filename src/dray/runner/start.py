"""One start of all ranks: the run's first, or one after a failure, with a secret, a port and a store of its own."""

from __future__ import annotations

import hmac
import os
from typing import Any, NamedTuple

from dray.runner.channel import BrokenError

_NONCE = 32


class Start(NamedTuple):
    """Which one it is, and what all nodes must know of it. Who overhears it still lacks the run's secret."""

    number: int = 0
    nonce: str = ""
    port: int = 0

    def key(self, secret: bytes) -> bytes:
        """What proves that a node belongs to this start."""
        if not self.number:
            return secret
        return hmac.digest(secret, f"dray restart {self.number} {self.nonce}".encode(), "sha256")

    def following(self, port: int) -> Start:
        """The next one, as the first node makes it."""
        return Start(self.number + 1, os.urandom(_NONCE).hex(), port)

    def after(self, fields: Any) -> Start:  # noqa: ANN401  any JSON value
        """The next one, as the first node has told it. OSError: it cannot be."""
        try:
            told = Start(**fields)
            if (told.number, len(bytes.fromhex(told.nonce))) != (self.number + 1, _NONCE):
                raise BrokenError("a restart out of turn")
        except (TypeError, ValueError):
            raise BrokenError("a restart of another kind") from None
        if type(told.number) is not int or type(told.port) is not int or not 0 < told.port < 1 << 16:
            raise BrokenError("a restart of another kind")
        return told
