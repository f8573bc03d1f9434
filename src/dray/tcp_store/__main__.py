"""`python -m dray.tcp_store ADDRESS PORT FILE`: serve torch's TCPStore on a listening socket, until the runner ends.

Launchers and ranks may connect before torch is imported: the kernel has them wait at the socket.
"""

from __future__ import annotations

import resource
import signal
import sys


def main(address: str, port: int, file: int) -> None:
    """Ignore all signals until the runner ends: if all processes are signalled, ranks still agree through the store."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415
    except ImportError as error:
        print(f"dray: there is no store at MASTER_ADDR and MASTER_PORT: {error}", file=sys.stderr, flush=True)
        return
    # Each rank holds connections: 9,408 nodes of 8 hold more than the runner's own limit.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=file)
    while store:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
