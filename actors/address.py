"""The address by which other hosts reach this one.

`PHYSARUM_ADDRESS` names it (a host name or an IP address; a pod's own, or that of a faster network). Without it: of a run of
several machines the address from which this host reaches the bus, else its name. The supervisor decides and tells its actors.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Final
from urllib.parse import urlsplit

VARIABLE: Final = "PHYSARUM_ADDRESS"
_BUS_PORT: Final = 4222


def own_address() -> str:
    """As the supervisor told this process, or the host's name."""
    return os.environ.get(VARIABLE) or socket.gethostname()


def towards(bus_url: str) -> str:
    """`PHYSARUM_ADDRESS`, or the one of the way to the bus; the host's name where there is no way now."""
    if given := os.environ.get(VARIABLE):
        return given
    parts = urlsplit(bus_url.split(",")[0])
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or _BUS_PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, place = found[0]
        with socket.socket(family, kind) as probe:  # no packet is sent: the kernel only looks up the route
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def is_loopback(address: str) -> bool:
    """Whether other hosts that use it reach themselves."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def http_url(address: str, port: int) -> str:
    """With brackets round an IPv6 address."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
