"""Which carriers there are and which one a process gets: what is configured, or by `auto` the first that this host can use by
RDMA, else HTTP alone. To add one: a line in KINDS.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from physarum.weightsync.carriers.carrier import Carrier
from physarum.weightsync.carriers.mooncake import MooncakeCarrier
from physarum.weightsync.carriers.nixl import NixlCarrier
from physarum.weightsync.errors import CarrierError

_DEVICES: Final = Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One carrier. `modules`: any of them must import; `extra`: what installs it; `make(host)`: its carrier here."""

    name: str
    modules: tuple[str, ...]
    extra: str
    make: Callable[[str], Carrier]

    def lacks(self) -> str:
        """Why it cannot be used in this Python, with the remedy; "" when it can."""
        reasons = []
        for module in self.modules:
            try:
                importlib.import_module(module)
            except (ImportError, OSError) as error:
                reasons.append(f"{module}: {error}")
            else:
                return ""
        return (
            f"checkpoint.carrier {self.name}: {'; '.join(reasons)}. Install the extra `{self.extra}` (pip install"
            f" 'physarum[{self.extra}]') on every host, and the system's RDMA libraries (libibverbs1, librdmacm1), or set"
            " `checkpoint.carrier: http`"
        )


def rdma_devices() -> list[str]:
    """Of this host, by name."""
    return sorted(device.name for device in _DEVICES.glob("*"))


KINDS: Final = (
    Kind(
        name="mooncake",
        modules=("mooncake.engine",),
        extra="mooncake",
        make=lambda host: MooncakeCarrier(host, "rdma" if rdma_devices() else "tcp"),
    ),
    Kind(name="nixl", modules=("nixl._api", "nixl_cu12._api"), extra="nixl", make=lambda host: NixlCarrier()),
)


def lacking(configured: str) -> str:
    """What the carrier that is configured lacks here, with the remedy; "" for nothing. Imports it: takes seconds."""
    return next((kind.lacks() for kind in KINDS if kind.name == configured), "")


def carrier_for(configured: str, host: str) -> Carrier | None:
    """This process's, which is the caller's to close; None: chunks travel by HTTP alone. Raises CarrierError. Blocking."""
    if configured == "http" or (configured == "auto" and not rdma_devices()):
        return None
    for kind in KINDS:
        if configured not in ("auto", kind.name):
            continue
        if not (lack := kind.lacks()):
            return kind.make(host)
        if configured != "auto":
            raise CarrierError(lack)
    return None
