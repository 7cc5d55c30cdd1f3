"""A bucket that is read by a process of its own, so that each call has a deadline whatever the store's client does.

Invariant: after a deadline nothing is known of the process, so it is killed, and what else was asked of it fails; the next call
starts another. Blocking; any number of threads may ask at the same time.
"""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, Literal

import msgspec

from physarum.weightsync.errors import BucketError, BucketUnfitError, ObjectAbsentError
from physarum.weightsync.mirror.wire import ABSENT, FAILED, OK, Question, receive_answer

_log = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", "physarum.weightsync.mirror.process")
DEFAULT_THREADS: Final = 16
"""Requests under way at once: a store answers each after tens of milliseconds."""


class _Process:
    """One process, and what was asked of it."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.numbers = itertools.count()
        self.asked: dict[int, Future[tuple[int, bytes]]] = {}
        self.guard = threading.Lock()
        self.ended = False
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._listen, name="bucket", daemon=True).start()

    def ask(self, call: Literal["get", "sizes"], key: str) -> Future[tuple[int, bytes]]:
        """Raises BucketError when it has ended."""
        future: Future[tuple[int, bytes]] = Future()
        assert self.popen.stdin is not None  # it was asked for
        with self.guard:
            question = Question(next(self.numbers), call, key)
            try:
                if self.ended:
                    raise BrokenPipeError("it has ended")
                self.popen.stdin.write(msgspec.json.encode(question) + b"\n")
                self.popen.stdin.flush()
            except (OSError, ValueError) as error:
                raise BucketError(f"the process that speaks to the store is gone: {error}; the log says why") from error
            self.asked[question.number] = future
        return future

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        with self.guard, suppress(OSError):
            assert self.popen.stdin is not None  # it was asked for
            self.popen.stdin.close()

    def _listen(self) -> None:
        """Hands out answers until the process ends; what was asked then fails."""
        assert self.popen.stdout is not None  # it was asked for
        while (answer := receive_answer(self.popen.stdout)) is not None:  # type: ignore[arg-type]
            number, kind, data = answer
            with self.guard:
                future = self.asked.pop(number)
            future.set_result((kind, data))
        with self.guard:
            self.ended, left = True, list(self.asked.values())
            self.asked.clear()
        for future in left:
            future.set_result(
                (FAILED, b"the process that speaks to the store ended without an answer; the log says why")
            )
        self.popen.stdout.close()


class BucketApart:
    """What is under `url`, to be read only. `timeout_s` bounds each call, also one that must start the process first."""

    def __init__(self, url: str, timeout_s: float, threads: int = DEFAULT_THREADS) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._threads = threads
        self._process: _Process | None = None
        self._guard = threading.Lock()

    def get(self, key: str) -> bytes:
        """As Bucket.get."""
        return self._call("get", key)

    def sizes(self, below: str) -> dict[str, int]:
        """As Bucket.sizes."""
        return msgspec.json.decode(self._call("sizes", below), type=dict[str, int])

    def close(self) -> None:
        """What is under way fails; a later call starts another process."""
        with self._guard:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _call(self, call: Literal["get", "sizes"], key: str) -> bytes:
        process = self._started()
        try:
            kind, data = process.ask(call, key).result(self._timeout_s)
        except TimeoutError as error:
            self._give_up(process)
            raise BucketError(
                f"{self.url}/{key}: the store was silent for {self._timeout_s:g} s; see to the network, or raise"
                " checkpoint.versions.timeout_s (of `weights pull`: --timeout)"
            ) from error
        except BucketError:
            self._give_up(process)
            raise
        if kind == OK:
            return data
        text = data.decode(errors="replace")
        if kind == FAILED:
            raise BucketError(text)
        raise ObjectAbsentError(text) if kind == ABSENT else BucketUnfitError(text)

    def _started(self) -> _Process:
        with self._guard:
            if self._process is None or self._process.ended:
                self._process = _Process((*COMMAND, self.url, str(self._threads)))
            return self._process

    def _give_up(self, process: _Process) -> None:
        with self._guard:
            if self._process is process:
                self._process = None
        process.end()
