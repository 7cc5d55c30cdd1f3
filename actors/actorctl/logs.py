"""`actorctl logs`: the last lines of the actors' logs, and (-f) what is added to them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.errors import NotRunningError
from physarum.configs.origin import display_path


class Line(NamedTuple):
    """One line of one actor's log."""

    instance: str
    text: str


def log_files(folder: RunFolder, instance: str | None) -> list[Path]:
    """The log of one instance, or all. Raises NotRunningError naming those that exist."""
    found = sorted(folder.logs.glob("*.log"))
    if instance is not None:
        found = [path for path in found if path.stem == instance]
    if not found:
        known = ", ".join(path.stem for path in sorted(folder.logs.glob("*.log"))) or "none"
        raise NotRunningError(f"no log of {instance or 'any actor'} in {display_path(folder.logs)}; there are: {known}")
    return found


def is_here(folder: RunFolder, instance: str | None) -> bool:
    """Whether this machine has the log (some logs, without an instance)."""
    return any(instance in (None, path.stem) for path in folder.logs.glob("*.log"))


def read(paths: list[Path], count: int, follow: bool) -> Iterator[Line]:
    """The last `count` lines of each file, then (`follow`) every new one, also across rotation; by the `tail` program."""
    command = ["tail", "-v", "-n", str(count), *(["-F"] if follow else []), *map(str, paths)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
    ) as tail:
        assert tail.stdout is not None
        try:
            yield from _attributed(tail.stdout)
        finally:
            tail.kill()


def show(lines: Iterable[Line], as_json: bool, prefixed: bool) -> None:
    """Until the lines end, the reader goes away, or Ctrl-C."""
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for line in lines:
            if as_json:
                text = orjson.dumps(line._asdict()).decode()
            else:
                text = f"{line.instance} | {line.text}" if prefixed else line.text
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def _attributed(stream: Iterable[str]) -> Iterator[Line]:
    """Reads tail's `==> FILE <==` headings; the empty line before a heading is tail's too."""
    instance, blank = "", False
    for raw in stream:
        text = raw.rstrip("\n")
        if text.startswith("==> ") and text.endswith(".log <=="):
            instance, blank = Path(text[4:-4]).stem, False
            continue
        if blank:
            yield Line(instance, "")
        blank = text == ""
        if not blank:
            yield Line(instance, text)
    if blank:
        yield Line(instance, "")
