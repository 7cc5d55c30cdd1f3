"""A run's checkpoints in its mirror: which are there, whether they are whole, and one of them brought back."""

from __future__ import annotations

import asyncio
import shutil

import msgspec

from physarum.actors.errors import UnrecoverableError
from physarum.actors.mirror.asking import ask, mirror_url
from physarum.actors.mirror.records import Copied, Copy, Named, Survey, Surveyed, Verified, Verify
from physarum.actors.mirror.restoring import bring_back
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import NotInRunError, RunUnfitError
from physarum.actors.tools.saved import Saved, listed
from physarum.actors.trainer.checkpoints import Checkpoints
from physarum.actors.trainer.recovery import recover
from physarum.bus import ledger


async def surveyed(run: OpenRun, found: list[Saved]) -> list[Saved]:
    """`found` with what the mirror says of each; as it is for a run without one. Raises MirrorError."""
    url = mirror_url(run.config)
    if url is None or not found:
        return found
    request = Survey(url, [_named(one) for one in found])
    whole = set((await ask(request, Surveyed, run.config.checkpoint.mirror_timeout_s)).whole)
    return [msgspec.structs.replace(one, mirrored=_named(one) in whole) for one in found]


async def verified(run: OpenRun, name: str | None) -> list[Saved]:
    """Reads those in the mirror (or the one named) byte by byte. Raises NotInRunError, RunUnfitError, MirrorError."""
    url = _url(run)
    found = await surveyed(run, await listed(run))
    chosen = [one for one in found if (one.mirrored if name is None else one.name == name)]
    if name is not None and not chosen:
        raise _not_in_run(run, name, found)
    request = Verify(url, [_named(one) for one in chosen])
    faults = (await ask(request, Verified, run.config.checkpoint.mirror_timeout_s)).faults
    return [msgspec.structs.replace(one, fault=fault) for one, fault in zip(chosen, faults, strict=True)]


async def copy(run: OpenRun, name: str | None) -> tuple[Saved, int]:
    """Copies a checkpoint that is on disk (by default the one that the run goes on from) now; returns it and the bytes sent,
    0 where it was there. Raises NotInRunError, RunUnfitError, MirrorError, MirrorUnfitError."""
    url, chosen = _url(run), await _chosen(run, name)
    if not chosen.on_disk:
        raise NotInRunError(f"checkpoint {chosen.name} of run {run.name} is not on disk")
    folder = await asyncio.to_thread(Checkpoints(run.folder.checkpoints).linked, chosen.name)
    try:
        request = Copy(url=url, folder=str(folder), checkpoint=_named(chosen))
        copied = await ask(request, Copied, run.config.checkpoint.mirror_timeout_s)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return msgspec.structs.replace(chosen, mirrored=True), copied.size_bytes


async def restore(run: OpenRun, name: str | None) -> tuple[Saved, int]:
    """Brings a checkpoint (by default the one that the run would go on from) back to disk; returns it and the bytes brought, 0
    where it was there whole. A damaged one is replaced.

    Raises NotInRunError, RunUnfitError, MirrorError (another try may help), MirrorUnfitError (not there, or altered).
    """
    _url(run)
    store, chosen = Checkpoints(run.folder.checkpoints), await _chosen(run, name)
    if chosen.on_disk and await asyncio.to_thread(_whole, store, chosen):
        return chosen, 0
    brought = await bring_back(run.config, store, _named(chosen))
    return next(one for one in await listed(run) if one.name == chosen.name), brought


async def _chosen(run: OpenRun, name: str | None) -> Saved:
    found = await listed(run)
    if name is None:
        durable = recover(await ledger.read(run.bus, key=run.ledger)).durable
        if durable is None:
            raise NotInRunError(f"run {run.name} has no checkpoint yet")
        name = durable.folder
    chosen = [one for one in found if one.name == name]
    if not chosen:
        raise _not_in_run(run, name, found)
    return chosen[0]


def _url(run: OpenRun) -> str:
    url = mirror_url(run.config)
    if url is None:
        raise RunUnfitError(f"run {run.name} has no mirror; its configuration would name one (checkpoint.mirror)")
    return url


def _not_in_run(run: OpenRun, name: str, found: list[Saved]) -> NotInRunError:
    there = ", ".join(one.name for one in found) or "none"
    return NotInRunError(f"run {run.name} never had a checkpoint {name}; it had {there}")


def _whole(store: Checkpoints, saved: Saved) -> bool:
    try:
        store.load(saved.name, saved.digest)
    except UnrecoverableError:
        return False
    return True


def _named(saved: Saved) -> Named:
    return Named(saved.name, saved.digest)
