"""Training states are written beside training: each rank has a thread for it, and rank 0's hears when all are done.

    rank     step | take | step ...           take: a copy in host memory, for which alone training stands still
    thread               write, flush, tell

Invariant: one state is written at a time; `written` returns after every rank has ended, well or not, so that nobody
still writes into a folder that is then committed or removed. At its deadline, or once the world is gone, it raises at once:
nothing is committed then.
"""

import datetime
import threading
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from physarum.actors.trainer.errors import StateNotWritten, describe

_HOST = "127.0.0.1"
_CONNECT_S = 60.0
_LEAST_S = 1.0
"""For ranks that have ended to be heard."""
_END = "the world ended before all ranks had written"


class StateWriting:
    """One rank's. `store`: the world's rendezvous, which is spoken to over connections of its own."""

    def __init__(self, rank: int, ranks: int, store: dist.TCPStore) -> None:
        self._rank, self._ranks, self._port = rank, ranks, store.port
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._number = 0
        self._waits = self._ended = False

    def begin(self, write: Callable[[], None]) -> None:
        """Goes on with `write` in the thread, once the state before is written."""
        self.join()
        self._number += 1
        self._failure = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="training state", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for this rank's own; whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def written(self, timeout_s: float) -> None:
        """Rank 0, in any thread: waits until all ranks have ended. Raises StateNotWritten for what any of them raised."""
        ends = time.monotonic() + timeout_s
        if not self.join(timeout_s):
            raise self._late(timeout_s)
        failures = self._others(timeout_s, max(ends - time.monotonic(), _LEAST_S))
        if self._failure is not None and not isinstance(self._failure, StateNotWritten):
            raise self._failure
        if self._failure is not None:
            failures = [f"rank 0: {describe(self._failure)}", *failures]
        if failures:
            raise StateNotWritten("; ".join(failures)) from self._failure

    def abandon(self) -> None:
        """Rank 0, whose world is no more: `written` waits for no other rank any longer."""
        self._ended = True
        if self._waits:
            store = self._store(_CONNECT_S)
            for rank in range(1, self._ranks):
                store.compare_set(self._key(rank), "", _END)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._failure = error
            _forget_locals(error)
        del write
        if self._rank > 0:
            text = describe(self._failure) if self._failure is not None else ""
            self._store(_CONNECT_S).set(self._key(self._rank), text)

    def _others(self, timeout_s: float, left_s: float) -> list[str]:
        """What went wrong on the other ranks; `left_s` of `timeout_s` are left."""
        keys = [self._key(rank) for rank in range(1, self._ranks)]
        if not keys:
            return []
        if self._ended:
            return [_END]  # the store may be gone, too
        store = self._store(_CONNECT_S)
        self._waits = True
        if self._ended:
            return [_END]
        try:
            store.wait(keys, datetime.timedelta(seconds=left_s))
        except dist.DistStoreError as error:
            raise self._late(timeout_s) from error
        finally:
            self._waits = False
        found = {rank: store.get(key).decode() for rank, key in enumerate(keys, 1)}
        for key in keys:
            store.delete_key(key)
        return [f"rank {rank}: {text}" for rank, text in found.items() if text]

    def _late(self, timeout_s: float) -> StateNotWritten:
        return StateNotWritten(
            f"not all of {self._ranks} ranks had written the training state within {timeout_s:g} s "
            "(trainer.step_timeout_s); look at the disk, or allow more"
        )

    def _store(self, timeout_s: float) -> dist.TCPStore:
        return dist.TCPStore(_HOST, self._port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))

    def _key(self, rank: int) -> str:
        return f"state/{self._number}/{rank}"


def _forget_locals(error: BaseException) -> None:
    """An error that is kept, perhaps until a disk has room, would keep the copy of the state that its frames hold."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
