"""Where the first node listens, and by which interface each node reaches the others."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from dray.contract.findings import RetryError, UnfitError
from dray.runner.plan import World

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_BACKLOG = 65_535  # the kernel takes net.core.somaxconn at most, and who finds it full tries again
_BUSY_S = 5.0  # a run that is ending gives its port back within seconds


def listen(world: World) -> socket.socket:
    """A listening socket on the plan's port, or on a free one that the kernel chooses."""
    deadline, last = time.monotonic() + _BUSY_S, None
    for address in addresses(world):
        while True:
            try:
                return socket.create_server((address, world.port), backlog=_BACKLOG)
            except OSError as error:
                last = error
            if last.errno != errno.EADDRINUSE:  # a name may stand for an address that only others see
                break
            if time.monotonic() > deadline:
                raise RetryError(
                    f"port {world.port} is busy on {world.nodes[0].name}",
                    wanted=f"port {world.port} free on the first node",
                    found="another program listens there",
                    fix="remove `port` from the recipe, and dray takes a free one; or start the run again later",
                )
            time.sleep(0.2)
    raise UnfitError(
        "the first node has no address that the other nodes reach",
        wanted=f"{world.master} resolves to an address of the network between the nodes",
        found=last or f"it resolves to loopback, and no route leads to {world.nodes[1].name}",
        fix='set interfaces = ["NAME"] in the site file, with the name of the network interface between the nodes',
    )


def addresses(world: World) -> list[str]:
    """This node's addresses, the preferred one first; loopback for a run of one node."""
    found = []
    if len(world.nodes) == 1:
        return ["127.0.0.1"]
    # Machines of a hostfile reach one another by the file's names, and share no folder to learn another address from.
    if world.interfaces and world.shared_folder:
        return [interface(world.interfaces)]
    with suppress(OSError):
        found.append(socket.gethostbyname(world.master))
    with suppress(OSError):
        found.append(_route(world.nodes[1].address))
    # A name that its own machine resolves to loopback, as Debian's does, is another address for the others.
    return [address for address in found if not address.startswith("127.") or address == world.master]


def interface(names: Sequence[str]) -> str:
    """The address of the first of these interfaces that this node has."""
    for name in names:
        if address := _address(name):
            return address
    raise UnfitError(
        "the first node has none of the site's network interfaces",
        wanted=" or ".join(names),
        found=" ".join(name for _, name in socket.if_nameindex()),
        fix="correct `interfaces` in the site file, or ask for other nodes",
    )


def gloo(address: str) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME: the interface of this node's address in the rendezvous; empty if no interface has it.

    Without it gloo listens on the address of the host's name, which may be loopback.
    """
    if address.startswith("127."):  # all of them are loopback's, which has one
        return {"GLOO_SOCKET_IFNAME": "lo"}
    names = [name for _, name in socket.if_nameindex() if _address(name) == address]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
        return socket.inet_ntoa(found[20:24])


def _route(other: str) -> str:
    """The address from which this node would reach the other; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.connect((other, 9))
        return str(any_socket.getsockname()[0])
