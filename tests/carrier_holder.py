"""A process whose memory another reads: registers a file of bytes 0, 1, 2, ... with a carrier, prints its place, ends with its
standard input.

    python carrier_holder.py NAME FILE
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import msgspec

from physarum.weightsync.carriers.registry import carrier_for


def main() -> None:
    name, path = sys.argv[1], Path(sys.argv[2])
    carrier = carrier_for(name, "127.0.0.1")
    assert carrier is not None
    with path.open("r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))
        place = carrier.register(memory)
        sys.stdout.write(msgspec.json.encode(place).decode() + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        carrier.close()


if __name__ == "__main__":
    main()
