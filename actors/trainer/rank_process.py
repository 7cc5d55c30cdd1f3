"""Starting and watching the processes of ranks 1 to N - 1.

Invariant: only processes started here are ever signalled; an unexpected end is known at once (a thread waits on each
process) and wakes whoever waits for the rank to come up.
"""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import torch.distributed as dist

import physarum
from physarum.actors.trainer.rank import RankSettings
from physarum.actors.trainer.serve import connect
from physarum.actors.trainer.world_config import WorldConfig


class RankProcess:
    """One child process; `store` keys `rank/N` say "up" or how it ended."""

    def __init__(self, config: WorldConfig, rank: int, port: int) -> None:
        self.rank = rank
        settings = RankSettings(config, rank, port, os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "physarum.actors.trainer.rank"],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,  # the parent's standard output is not for logs
            env=_environment(config),
        )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it ended at once: the watch says how
            self._stdin.write(msgspec.json.encode(settings) + b"\n")
            self._stdin.flush()
        self._watch = threading.Thread(target=self._await_end, args=(connect(config, port),), daemon=True)
        self._watch.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return self._process.pid

    def ended_within(self, seconds: float) -> bool:
        """Whether it has ended, or does within `seconds`."""
        self._watch.join(seconds)
        return self._process.returncode is not None

    def end(self, grace_s: float) -> None:
        """Wait `grace_s` for it to leave by itself, then kill it; returns when it is reaped."""
        self._watch.join(grace_s)
        if self._process.returncode is None:
            self._process.kill()
            self._watch.join()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def _await_end(self, store: dist.TCPStore) -> None:
        code = self._process.wait()
        try:
            store.set(f"rank/{self.rank}", f"exit code {code}")
        except (RuntimeError, OSError):
            return  # the store is gone: the world was closed, nobody waits for this rank


def _environment(config: WorldConfig) -> dict[str, str]:
    root = str(Path(physarum.__file__).absolute().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(config.threads)}
