"""Progress of what happens before the actors start: the making or fetching of the start model."""

from __future__ import annotations

from typing import Final, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

_LINE_EVERY: Final = 0.1
"""Without a terminal: one line for each tenth of a download."""


class TerminalReporter:
    """A progress bar for a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        self._console.print(text)

    def progress(self, what: str, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(what, total=total_bytes)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done_bytes, total=total_bytes)
        if done_bytes >= total_bytes:
            self._bar.stop()


class LineReporter:
    """Plain lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = 0.0

    def say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def progress(self, what: str, done_bytes: int, total_bytes: int) -> None:
        share = done_bytes / total_bytes if total_bytes else 1.0
        if share >= self._shown + _LINE_EVERY or (share >= 1.0 > self._shown):
            self._shown = share
            self.say(f"fetching {what}: {100 * share:.0f} % of {total_bytes / 2**20:.1f} MiB")
