"""One engine among its group: which version it is to have, when it may load it, and its vote as a canary.

Where the group has no canaries every head is wanted, and only the turns of those that stand still are waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from physarum.actors import states
from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.errors import EngineError, NothingPassedError
from physarum.actors.engine.gate import Probe, refusal
from physarum.actors.policy_engines import ON_TRIAL
from physarum.actors.waiting import unless_draining
from physarum.bus.errors import BusError
from physarum.bus.register import Register
from physarum.configs.engine import EngineConfig
from physarum.weightsync.canary import Canary, Trial
from physarum.weightsync.errors import UpdateRefusedError
from physarum.weightsync.manifest import Manifest, manifest_digest
from physarum.weightsync.turns import Turn, Turns

if TYPE_CHECKING:
    from physarum.actors.engine.actor import EngineActor

_log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """A version, and the digest of the manifest that it has: by the head, or by the trial in which it passed."""

    label: str
    manifest: str


class Trials:
    """`judging`: this engine has a version that nobody let pass yet."""

    def __init__(self, actor: EngineActor, settings: EngineConfig, group: str, control: EngineControl) -> None:
        self.judging = False
        self._state_before = ""
        self._actor, self._settings, self._group, self._control = actor, settings, group, control
        context, config = actor.context, settings.canary
        self._turns = Turns(
            Register(context.bus, context.publisher, "weights", Turn),
            (states.TURN, context.config.model.name, group),
            context.identity.instance,
            settings.updated_at_once,
            3 * settings.update_timeout_s,  # pause, load, continue
        )
        self._canary: Canary | None = None
        if config is not None:
            limit_s = 4 * settings.update_timeout_s + config.timeout_s  # a turn, and the gate
            register = Register(context.bus, context.publisher, "weights", Trial)
            key = (states.CANARY, context.config.model.name, group)
            self._canary = Canary(register, key, context.identity.instance, settings.canaries, limit_s)

    async def wanted(self, head: states.Head, serves_nothing: bool) -> Wanted:
        """What the engine is to serve next: the head; what passed before, where the head was refused or others try it
        and the engine `serves_nothing` meanwhile. Raises NothingPassedError, BusError."""
        newest = Wanted(head.label, head.manifest)
        if self._canary is None:
            return newest
        self._canary.withdrawn = head.withdrawn
        trial = await self._canary.current()
        if trial is None or trial.label != head.label:
            return newest
        if trial.verdict == "refused":
            return Wanted(trial.passed or self._nothing(trial), trial.passed_manifest)
        on_trial = trial.verdict == "open" and not self._canary.has_place(trial)
        if trial.passed is not None and serves_nothing and on_trial:
            return Wanted(trial.passed, trial.passed_manifest)
        return newest

    def _nothing(self, trial: Trial) -> NoReturn:
        """The start model is no way out: the first version of a run is the start model."""
        raise NothingPassedError(
            f"{trial.label} was refused by its canary ({trial.reason}), and no version that still holds has passed before, so"
            f" the engines of group {self._group} have nothing to serve; correct engines.{self._group}.canary (its gate, or"
            " what that measures against) or the start model, then go on with `actorctl up`"
        )

    @asynccontextmanager
    async def turn(self, label: str) -> AsyncIterator[None]:
        """Begins once the engine may load `label`. A canary that drains, or whose update was refused with its engine as it was,
        gives its place to another. Raises VersionRefusedError, StaleVersionError, BusError, UpdateRefusedError when the actor
        drains."""
        await self._admitted(label)
        try:
            async with self._turns.take():
                yield
        except (UpdateRefusedError, BusError):
            if self._canary is not None and self.judging:
                await self._canary.leave(label)
            raise
        except asyncio.CancelledError:
            # Only where the actor drains: else its engine may have died of the version, and others are kept from that.
            if self._canary is not None and self.judging and self._actor.context.draining.is_set():
                await self._canary.leave(label)
            raise

    async def _admitted(self, label: str) -> None:
        if self._canary is None:
            return
        is_canary = await unless_draining(self._actor.context, self._canary.admitted(label))
        if is_canary is None:
            await self._canary.leave(label)  # the place may have been stored before that was known here
            raise UpdateRefusedError(f"{label} is not loaded any more: the engine is left as it is")
        if is_canary:
            self.judging, self._state_before = True, self._actor.own_state
            self._actor.become(ON_TRIAL)

    def stand_down(self) -> None:
        """The update was not done: the engine serves what it served, if it answered before."""
        if self.judging and self._actor.own_state == ON_TRIAL:
            self._actor.become(self._state_before)
        self.judging = False

    async def refused(self, manifest: Manifest) -> str | None:
        """Why this engine, as a canary, refuses what it now serves, or cannot say anything of it; None: it passes, or is no
        canary's. Raises BusError."""
        config = self._settings.canary
        if self._canary is None or config is None or not self.judging:
            return None
        trial = await self._canary.current()
        probe = Probe(
            url=self._control.base_url,
            manifest=manifest,
            previous=trial.passed if trial is not None else None,
            vocabulary=await asyncio.to_thread(self._vocabulary),
            timeout_s=config.timeout_s,
            control=self._control,
        )
        reason = await refusal(config, probe)
        if not await self._may_serve(manifest.label):
            await self._canary.leave(manifest.label)
            return "the engine was started anew while it was on trial: its gate saw other weights"
        if reason is not None:
            _log.error("%s is refused by its canary: %s", manifest.label, reason)
        await self._canary.vote(manifest.label, reason, manifest_digest(manifest))
        return reason

    async def _may_serve(self, label: str) -> bool:
        """Not where the engine says that it serves something else; for not answering it was judged."""
        try:
            return await self._control.live_label() == label
        except EngineError:
            return True

    def _vocabulary(self) -> int:
        from transformers import AutoConfig  # seconds of imports, for canaries alone

        return int(AutoConfig.from_pretrained(self._actor.context.folder.start_model).vocab_size)
