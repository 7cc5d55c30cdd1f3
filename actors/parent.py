"""A process that never outlives the one that started it, however that one ends."""

import ctypes
import os
import signal
import threading
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, stream: BinaryIO) -> None:
    """End this process when process `parent` or the writing end of `stream` is gone."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; expected Linux")
    if os.getppid() != parent:
        raise SystemExit(f"parent is {os.getppid()}, expected {parent}: it died before this process was ready")

    def watch() -> None:
        while os.read(stream.fileno(), 4096):  # unbuffered: the interpreter's end must not wait for the stream's lock
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
