"""Where an engine's versions come from: the checkpoint service and, where one is configured, the object store behind it.

    engines.GROUP.weights_from: service    service's manifest and chunks; the store's, where the service does not answer
                                mirror     the store alone (and other receivers): no service is waited for

Invariant: a manifest from the store is taken only if it is the one that the head names, or the trial of a canary group in which
the version passed, so nothing else is ever served.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from physarum.actors.context import Context
from physarum.actors.engine.trials import Wanted
from physarum.actors.mirror.asking import versions_url
from physarum.bus.presence import Roster
from physarum.bus.version import Version
from physarum.configs.engine import EngineConfig
from physarum.configs.secrets import read_secret
from physarum.weightsync.errors import BucketUnfitError, ServiceRefusedError, ServiceUnreachableError
from physarum.weightsync.manifest import Manifest, manifest_digest
from physarum.weightsync.mirror.apart import BucketApart
from physarum.weightsync.mirror.reading import Mirror
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.service_client import CheckpointClient

_log = logging.getLogger(__name__)


class Origin:
    """Of one engine actor."""

    def __init__(self, context: Context, settings: EngineConfig, session: aiohttp.ClientSession) -> None:
        config = context.config.checkpoint
        self.token = read_secret(config.token_env)
        self.mirror: Mirror | None = None
        self._bucket: BucketApart | None = None
        self._session = session
        self.is_mirror = settings.weights_from == "mirror"
        url = versions_url(context.config)
        if config.versions is not None and url is not None:
            self._bucket = BucketApart(url, config.versions.timeout_s)
            self.mirror = Mirror(self._bucket, read_secret(config.versions.key_env))

    def urls(self, services: Roster) -> list[str]:
        """Of the services that are to be asked for chunks."""
        return [] if self.is_mirror else [beat.facts["url"] for beat in services.members if "url" in beat.facts]

    async def manifest(self, wanted: Wanted, urls: list[str]) -> Manifest:
        """Of a version; out of the store only the one that the bus names. Raises ServiceUnreachableError, ServiceRefusedError;
        where the store is asked, BucketError, BucketUnfitError."""
        label = wanted.label
        refused: ServiceRefusedError | ServiceUnreachableError
        try:
            if urls:
                return await CheckpointClient(urls[0], self.token, self._session).get_manifest(label)
            refused = ServiceUnreachableError(f"{label}: no checkpoint service has announced itself")
        except (ServiceRefusedError, ServiceUnreachableError) as error:
            refused = error
        if self.mirror is None:
            raise refused
        if not self.is_mirror:
            _log.warning("%s is looked for in %s: %s", label, self.mirror.url, refused)
        return await self._of_mirror(self.mirror, wanted)

    async def close(self) -> None:
        """What is under way there ends."""
        if self._bucket is not None:
            await asyncio.to_thread(self._bucket.close)

    async def _of_mirror(self, mirror: Mirror, wanted: Wanted) -> Manifest:
        manifest = (await in_thread(mirror.record, Version.parse(wanted.label))).manifest
        if manifest_digest(manifest) != wanted.manifest:
            raise BucketUnfitError(
                f"{mirror.url} has {wanted.label} with a manifest of digest {manifest_digest(manifest)}, the bus names"
                f" {wanted.manifest or 'none'}: another run's, or altered"
            )
        return manifest
