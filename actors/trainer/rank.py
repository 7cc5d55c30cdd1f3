"""The process of ranks 1 to N - 1: do what rank 0 says until it closes.

Invariant: it never outlives its parent: the kernel kills it with the parent's thread that started it, and the end of
its standard input ends it.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
from typing import BinaryIO

import msgspec

from physarum.actors.trainer.world_config import WorldConfig

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class RankSettings(msgspec.Struct, frozen=True):
    """First line of standard input, JSON."""

    config: WorldConfig
    rank: int
    port: int
    parent: int


def main() -> None:
    """Entry point of `python -m physarum.actors.trainer.rank`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankSettings)
    die_with_parent(settings.parent, sys.stdin.buffer)
    from physarum.actors.trainer.serve import serve  # imports torch and megatron, after the parent's death is watched

    serve(settings.config, settings.rank, settings.port)


def die_with_parent(parent: int, stream: BinaryIO) -> None:
    """End this process when process `parent` or the writing end of `stream` is gone."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; expected Linux")
    if os.getppid() != parent:
        raise SystemExit(f"parent is {os.getppid()}, expected {parent}: it died before this rank was ready")

    def watch() -> None:
        while os.read(stream.fileno(), 4096):  # unbuffered: the interpreter's end must not wait for the stream's lock
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    main()
