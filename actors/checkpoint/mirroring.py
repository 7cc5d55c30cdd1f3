"""Copying versions to an object store beside the service: one at a time, the newest wins, and nobody waits for it.

    head moves --> [is it due?] --> a process sends what the store lacks, the record last --> old ones go --> "mirrored" moves

A failure is logged and counted; the next version is the next try.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from physarum.actors import states
from physarum.actors.mirror.asking import ask, versions_url
from physarum.actors.mirror.errors import MirrorError, MirrorUnfitError
from physarum.actors.mirror.records import CopyVersion, VersionCopied
from physarum.actors.served_model import served_model
from physarum.actors.waiting import unless_draining
from physarum.bus.errors import BusError, WrongSequenceError
from physarum.bus.register import Register
from physarum.bus.version import Version
from physarum.weightsync.catalogue import Catalogue
from physarum.weightsync.manifest import Manifest, encode_manifest

if TYPE_CHECKING:
    from physarum.actors.checkpoint.actor import CheckpointActor

_log = logging.getLogger(__name__)

_AGAIN_S: Final = 1.0
_DRAIN_SHARE: Final = 0.5
"""Of `supervisor.drain_timeout_s`: the rest is for the service's own end."""


class Mirroring:
    """Of one checkpoint actor; does nothing without `checkpoint.versions`. The actor's numbers say `versions_mirrored` and
    `version_mirror_failures`."""

    def __init__(self, actor: CheckpointActor, catalogue: Catalogue) -> None:
        self._context, self._numbers, self._catalogue = actor.context, actor.numbers, catalogue
        self._settings, self._url = actor.config.checkpoint.versions, versions_url(actor.config)
        self._model = actor.config.model.name
        self._heads = Register(actor.context.bus, actor.context.publisher, "weights", states.Head)
        self._last: Version | None = None
        """That was copied."""
        self.under_way: str | None = None
        """The label of what is being copied: the service must not let go of it."""

    async def run(self) -> None:
        """Until draining; then the last version is copied, if that takes no longer than a drain can wait."""
        if self._settings is None:
            return
        while not self._context.draining.is_set():
            try:
                await unless_draining(self._context, self._follow())
            except BusError as error:
                _log.warning("versions are not copied to %s for now: %s", self._url, error)
                await unless_draining(self._context, asyncio.sleep(_AGAIN_S))
        try:
            async with asyncio.timeout(self._context.config.supervisor.drain_timeout_s * _DRAIN_SHARE):
                await self._bring(finally_=True)
        except TimeoutError:
            _log.warning("the run drains before its last version is in %s; the next start copies it", self._url)
        except BusError as error:
            _log.warning("the run drains, and nobody says which version is its last: %s", error)

    async def _follow(self) -> None:
        """Copies each head that is due, for ever; one that moves while another is copied is looked at then."""
        async with self._heads.watch(states.HEAD, self._model) as changed:
            while True:
                await changed.wait()
                changed.clear()
                await self._bring()

    async def _bring(self, finally_: bool = False) -> None:
        head = (await self._heads.get(states.HEAD, self._model)).value
        if head is None or not self._is_due(Version.parse(head.label), finally_):
            return
        manifest = self._catalogue.get(head.label)
        if manifest is None and self._context.config.checkpoint.count > 1:
            return  # another service took it, and copies it
        self.under_way = head.label
        try:
            await self._copy(head, manifest)
        except (MirrorError, MirrorUnfitError) as error:
            failures = self._failed()
            _log.error(
                "%s is not in %s (failure %d), the next is the next try: %s", head.label, self._url, failures, error
            )
        else:
            await self._announce(head)
            self._last = Version.parse(head.label)
        finally:
            self.under_way = None

    def _failed(self) -> float:
        """Counts it; how many by now."""
        failures = self._numbers["version_mirror_failures"] = self._numbers.get("version_mirror_failures", 0) + 1
        return failures

    def _is_due(self, version: Version, finally_: bool) -> bool:
        last, settings = self._last, self._settings
        assert settings is not None  # run() asked
        if last is None or version.epoch != last.epoch:
            return True
        return version.number >= last.number + (1 if finally_ else settings.every)

    async def _copy(self, head: states.Head, manifest: Manifest | None) -> None:
        settings, url, folder, area = self._settings, self._url, self._context.folder, self._catalogue.area
        assert settings is not None and url is not None and area is not None  # run() asked; every service has one
        if manifest is None:
            raise MirrorError(f"{head.label} is not here any more: its bytes were in memory that is gone")
        began_s = time.perf_counter()
        request = CopyVersion(
            url=url,
            manifest=encode_manifest(manifest),
            area=str(area.folder),
            chunks=str(folder.weights / "chunks"),
            model=str(served_model(folder, self._context.config).resolve()),
            withdrawn=list(head.withdrawn),
            keep=settings.keep,
            key_env=settings.key_env,
        )
        copied = await ask(request, VersionCopied, settings.timeout_s, "versions.timeout_s")
        seconds = time.perf_counter() - began_s
        self._numbers["versions_mirrored"] = self._numbers.get("versions_mirrored", 0) + 1
        _log.info(
            "%s is in %s: %d objects, %d bytes, %.1f s", head.label, url, copied.objects, copied.size_bytes, seconds
        )
        if copied.kept:  # whoever follows need not wait for that
            failures = self._failed()
            _log.error("older versions could not go from %s (failure %d): %s", url, failures, copied.kept)
        facts = {"version": head.label, "seconds": seconds, "bytes": copied.size_bytes, "objects": copied.objects}
        await self._context.emit("mirror_version", facts)

    async def _announce(self, head: states.Head) -> None:
        """To engines that read from the store alone; forward only."""
        entry = await self._heads.get(states.MIRRORED, self._model)
        before = entry.value
        if before is None or (before.epoch, before.number) < (head.epoch, head.number):
            with suppress(WrongSequenceError):  # another service's, which is as new as its own look at the head
                await self._heads.compare_and_set(head, entry.revision, states.MIRRORED, self._model)
