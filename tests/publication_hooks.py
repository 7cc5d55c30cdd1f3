"""A hook that holds a version's publication until the trainer says that batch after batch is over age."""

from __future__ import annotations

import asyncio
import logging

from physarum.weightsync.manifest import Manifest

_ALARM = "physarum.actors.trainer.age_alarm"


class _Heard(logging.Handler):
    """Sets `said` when anything is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.set()


async def hold_the_first(manifest: Manifest) -> None:
    """Hook `checkpoint.after_publish`, in the trainer."""
    if manifest.version.number != 1:
        return
    heard, logger = _Heard(), logging.getLogger(_ALARM)
    logger.addHandler(heard)
    try:
        await heard.said.wait()
    finally:
        logger.removeHandler(heard)
