"""Counters of a checkpoint service in the Prometheus text format (version 0.0.4). They only grow while it runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

_PREFIX = "physarum_checkpoint_"
_HELP = {
    "bytes_in": "Bytes of chunks received.",
    "bytes_out": "Bytes of chunks sent.",
    "chunks_in": "Chunks stored.",
    "chunks_known": "Chunks received that were stored already.",
    "chunks_out": "Chunks sent.",
    "differences_out": "Chunks sent as what differs from another one.",
    "manifests": "Versions accepted.",
    "manifests_refused": "Versions refused: older than the newest, other content, or chunks absent.",
    "checksum_failures": "Chunks received whose bytes were not what their digest said.",
    "unauthorized": "Requests without the right token.",
    "bytes_freed": "Bytes of chunks deleted by retention.",
}


@dataclass
class Counters:
    """One attribute per counter; see _HELP for what each counts."""

    bytes_in: int = 0
    bytes_out: int = 0
    chunks_in: int = 0
    chunks_known: int = 0
    chunks_out: int = 0
    differences_out: int = 0
    manifests: int = 0
    manifests_refused: int = 0
    checksum_failures: int = 0
    unauthorized: int = 0
    bytes_freed: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def prometheus(self) -> str:
        lines: list[str] = []
        for counter in fields(self):
            name = f"{_PREFIX}{counter.name}_total"
            lines += [f"# HELP {name} {_HELP[counter.name]}", f"# TYPE {name} counter"]
            lines.append(f"{name} {getattr(self, counter.name)}")
        return "\n".join(lines) + "\n"
