"""A folder that appears whole or not at all, and never over another one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from physarum.actors.tools.errors import ToolError
from physarum.actors.trainer.errors import TrainerError
from physarum.bus import room


@contextmanager
def new_folder(out: Path, refused: type[ToolError]) -> Iterator[Path]:
    """A folder beside `out` that becomes it when the block ends well. Blocking.

    Raises `refused` where `out` is there, or cannot be. A full disk and what a trainer's world raises are told in words of
    their own.
    """
    if out.exists():
        raise refused(f"{out} exists; expected a new folder: choose another name, or remove it")
    aside = out.with_name(f".{out.name}-writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        aside.rename(out)
    except OSError as error:
        if room.is_full(error) or isinstance(error, TrainerError):
            raise
        raise refused(
            f"nothing was made in {out.parent} ({error}); expected a folder to read and a place to write"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
