"""Bringing a checkpoint back from the mirror: aside, every byte compared with the ledger's digest, then renamed."""

from __future__ import annotations

import asyncio
import logging
import shutil

from physarum.actors.mirror.asking import ask, mirror_url
from physarum.actors.mirror.records import Fetch, Fetched, Named
from physarum.actors.trainer.checkpoints import Checkpoints
from physarum.configs.root import RootConfig

_log = logging.getLogger(__name__)


async def bring_back(config: RootConfig, checkpoints: Checkpoints, checkpoint: Named) -> int:
    """Puts it where it was on disk, in the place of what is there; returns its bytes.

    Raises MirrorError (another try may help), MirrorUnfitError (not there, altered).
    """
    url = mirror_url(config)
    assert url is not None, "only where checkpoint.mirror is set"
    aside = await asyncio.to_thread(checkpoints.restoring, checkpoint.name)
    try:
        request = Fetch(url, checkpoint, str(aside))
        fetched = await ask(request, Fetched, config.checkpoint.mirror_timeout_s)
        await asyncio.to_thread(checkpoints.place, aside, checkpoint.name)
    finally:
        await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
    _log.warning("checkpoint %s was brought back from %s (%d bytes)", checkpoint.name, url, fetched.size_bytes)
    return fetched.size_bytes


async def restore_missing(config: RootConfig, checkpoints: Checkpoints, checkpoint: Named) -> None:
    """Brings it back where there is a mirror and the folder is gone; a damaged one is left as it is. Raises as bring_back."""
    if mirror_url(config) is None or await asyncio.to_thread((checkpoints.folder / checkpoint.name).is_dir):
        return
    _log.warning("checkpoint %s is not in %s; looking for it in the mirror", checkpoint.name, checkpoints.folder)
    await bring_back(config, checkpoints, checkpoint)
