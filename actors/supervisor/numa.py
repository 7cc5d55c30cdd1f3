"""Which processors are near which devices, from the kernel's own tables; no NUMA library is needed."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PCI: Final = Path("/sys/bus/pci/devices")
_NODES: Final = Path("/sys/devices/system/node")
_TIMEOUT_S: Final = 10.0


def cpus_near(gpus: Sequence[str], pci: Path = _PCI, nodes: Path = _NODES) -> set[int]:
    """The processors of the NUMA nodes of `gpus` (indices or UUIDs); empty when there are none or the host does not say."""
    if not gpus:
        return set()
    addresses = _addresses()
    cpus: set[int] = set()
    for gpu in gpus:
        node = _read(pci / addresses.get(gpu, "absent") / "numa_node")
        if node is None or int(node) < 0:
            return set()
        cpus |= parse_list(_read(nodes / f"node{node}" / "cpulist") or "")
    return cpus


def parse_list(text: str) -> set[int]:
    """The kernel's list format: "0-3,8" is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


@functools.cache
def _addresses() -> dict[str, str]:
    """PCI address of each device by index and by UUID, in the kernel's spelling (0000:1b:00.0)."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, str] = {}
    for line in answer.splitlines():
        index, uuid, address = (part.strip() for part in line.split(","))
        # nvidia-smi writes a domain of eight digits, the kernel one of four.
        found[index] = found[uuid] = address.lower()[-12:]
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
