"""The engine actor: one SGLang server and its receiver; takes traffic only while it serves a verified head.

    start server -> healthy -> fetch head, verify, swap -> ready <--- next head: fetch, verify, pause, apply, go on
         |  dies: its last log lines end this actor              `--> quarantined: the server is started anew

Invariant: state "ready" is announced only with the label of weights that were verified and confirmed by the engine.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar, Final

import aiohttp

from physarum.actors import states
from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.errors import EngineArgumentError, EngineDiedError, EngineError
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.actors.engine.standing import Standing
from physarum.actors.errors import ActorError, UnrecoverableError
from physarum.actors.runtime import Actor
from physarum.actors.weights_area import weights_area
from physarum.bus.errors import BusError
from physarum.bus.presence import Roster
from physarum.bus.register import Register
from physarum.bus.version import Version
from physarum.configs.engine import EngineConfig
from physarum.configs.secrets import read_secret
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    EngineQuarantineError,
    ManifestError,
    NoRoomError,
    ServiceRefusedError,
    ServiceUnreachableError,
    StaleVersionError,
    UpdateRefusedError,
)
from physarum.weightsync.layout import forms_in
from physarum.weightsync.receiver import Receiver, SwapRecord
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging
from physarum.weightsync.target import PauseMode
from physarum.weightsync.turns import Turn, Turns

_log = logging.getLogger(__name__)

_TRANSIENT: Final = (
    BusError,
    NoRoomError,
    ChunkAlteredError,
    ChunkMissingError,
    ServiceRefusedError,
    ServiceUnreachableError,
    UpdateRefusedError,
)
_RETRY_S: Final = 2.0


class EngineActor(Actor):
    """Role engine, instance `<group>-<number>`. Announces facts group, url, version (label), engine_pid."""

    role: ClassVar[str] = "engine"

    async def run(self) -> None:
        self._group = self.context.identity.instance.rsplit("-", 1)[0]
        self._settings: EngineConfig = self.config.engines[self._group]
        self.facts = {"group": self._group}
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            process = await self._start(stack, session)
            control = EngineControl(process.url, session, update_timeout_s=self._settings.update_timeout_s)
            await control.capabilities()
            self._standing = Standing(self.context)
            self.facts |= {"url": process.url, "engine_pid": process.pid}
            died = asyncio.ensure_future(process.wait_exit())
            serving = asyncio.create_task(self._serve(session, control), name="serve heads")
            reporting = asyncio.create_task(self._report_load(control), name="report load")
            standing = asyncio.create_task(self._standing.run(), name="report versions")
            draining = asyncio.create_task(self.context.draining.wait(), name="draining")
            stack.callback(died.cancel)
            stack.push_async_callback(_ended, serving)
            stack.push_async_callback(_ended, reporting)
            stack.push_async_callback(_ended, standing)
            stack.callback(draining.cancel)
            await asyncio.wait({died, serving, draining}, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                return
            if died.done():
                raise process.death()
            serving.result()

    async def _start(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> EngineProcess:
        started = time.perf_counter()
        spec = EngineSpec(
            python=_engine_python(self._settings),
            model=self._settings.model or self.context.folder.start_model.resolve(),
            label="start",
            log_file=self.context.folder.logs / f"{self.context.identity.instance}.sglang.log",
            sglang=self._settings.sglang,
            environment=self._settings.env,
        )
        try:
            process = await EngineProcess.start(spec, cache=self.context.folder.path.parent / ".cache")
        except EngineArgumentError as error:
            raise UnrecoverableError(f"engines.{self._group}.sglang: {error}") from error
        stack.push_async_callback(process.stop)
        healthy = asyncio.create_task(process.wait_healthy(session, self._settings.start_timeout_s))
        draining = asyncio.create_task(self.context.draining.wait())
        stack.callback(draining.cancel)
        await asyncio.wait({healthy, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not healthy.done():
            healthy.cancel()
            raise ActorError("asked to stop while the engine was starting")
        try:
            healthy.result()
        except EngineDiedError as error:
            raise ActorError(f"the engine died at start: {error}") from error
        seconds = time.perf_counter() - started
        self.numbers["start_s"] = round(seconds, 1)
        await self.context.emit("engine_start", {"seconds": seconds})
        return process

    async def _serve(self, session: aiohttp.ClientSession, control: EngineControl) -> None:
        if self._settings.model is not None:
            self.facts["version"] = "frozen"
            self.become("ready")
            await self.context.draining.wait()
            return
        receiver = await asyncio.to_thread(self._receiver, session, control)
        self.become("waiting for weights")
        try:
            async with Roster(self.bus, "checkpoint").open() as services:
                await self._follow(receiver, session, services)
        finally:
            await receiver.close()

    async def _follow(self, receiver: Receiver, session: aiohttp.ClientSession, services: Roster) -> None:
        """Brings the engine to each head as it comes, for ever."""
        heads: Register[states.Head] = Register(self.bus, self.publisher, "weights", states.Head)
        model = self.config.model.name
        async with heads.watch(states.HEAD, model) as changed:
            while True:
                changed.clear()
                head = (await heads.get(states.HEAD, model)).value
                if head is not None and not await self._bring_to(head, receiver, session, services):
                    # Not reached: try again when the head or the holders change, at the latest after a moment.
                    await _either(changed, services, _RETRY_S)
                    continue
                await changed.wait()

    async def _report_load(self, control: EngineControl) -> None:
        """The server's own load, sampled for each heartbeat: it has no event for it."""
        while True:
            await asyncio.sleep(self.config.supervisor.heartbeat_s)
            try:
                load = await control.loads()
            except EngineError as error:
                _log.debug("no load from the engine: %s", error)
                continue
            self.numbers |= {
                "running": load.running,
                "waiting": load.waiting,
                "kv_usage": round(load.token_usage, 3),
                "tokens_per_s": round(load.generated_tokens_per_s, 1),
            }

    def _receiver(self, session: aiohttp.ClientSession, control: EngineControl) -> Receiver:
        mode: PauseMode = self._settings.pause
        return Receiver(
            control,
            Staging(weights_area(self.context.folder, self.config), self.context.identity.instance),
            session,
            live=None,
            expected=forms_in(self.context.folder.start_model.resolve()),
            mode=mode,
            turn=self._turns().take,
            on_state=self._standing.set,
        )

    def _turns(self) -> Turns:
        return Turns(
            Register(self.bus, self.publisher, "weights", Turn),
            (states.TURN, self.config.model.name, self._group),
            self.context.identity.instance,
            self._settings.updated_at_once,
            3 * self._settings.update_timeout_s,  # pause, load, continue
        )

    async def _bring_to(
        self, head: states.Head, receiver: Receiver, session: aiohttp.ClientSession, services: Roster
    ) -> bool:
        """Whether the engine now serves `head` (or something newer)."""
        version = Version.parse(head.label)
        if receiver.live is not None and receiver.live >= version:
            return True
        urls = [beat.facts["url"] for beat in services.members if "url" in beat.facts]
        if not urls:
            _log.warning("%s cannot be fetched: no checkpoint service has announced itself", head.label)
            return False
        token = read_secret(self.config.checkpoint.token_env)
        self._standing.set(head.label, "announced")
        try:
            manifest = await CheckpointClient(urls[0], token, session).get_manifest(head.label)
            swap = await receiver.apply(manifest, urls, token)
        except StaleVersionError:
            return True
        except ManifestError as error:
            raise UnrecoverableError(f"{head.label} does not fit the model that this engine serves: {error}") from error
        except EngineQuarantineError as error:
            self.become("quarantined")
            self._standing.set(head.label, "quarantined", str(error))
            await self._standing.flush()
            raise ActorError(f"the engine is quarantined and is started anew: {error}") from error
        except _TRANSIENT as error:
            _log.warning("%s not applied, the engine serves %s: %s", head.label, self.facts.get("version"), error)
            self._standing.set(head.label, "refused", str(error))
            return False
        self._standing.set(head.label, "live")
        await self._announce_swap(swap)
        return True

    async def _announce_swap(self, swap: SwapRecord) -> None:
        self.facts = {**self.facts, "version": str(swap.version)}
        self.numbers |= {"pause_ms": round(1e3 * swap.pause_s, 1), "updates": self.numbers.get("updates", 0) + 1}
        self.progressed()
        self.become("ready")
        await self.context.emit(
            "swap",
            {
                "version": str(swap.version),
                "pause_s": swap.pause_s,
                "fetch_s": swap.fetch_s,
                "bytes": swap.bytes_fetched,
                "bytes_applied": swap.bytes_applied,
                "swapped_at": swap.swapped_at,
            },
        )


def _engine_python(settings: EngineConfig) -> Path:
    """The configured interpreter, else .venv-engine beside this environment, else this one."""
    if settings.python is not None:
        return settings.python
    beside = Path(sys.prefix).parent / ".venv-engine" / "bin" / "python"
    return beside if beside.exists() else Path(sys.executable)


async def _either(changed: asyncio.Event, services: Roster, timeout_s: float) -> None:
    waiters = {asyncio.ensure_future(changed.wait()), asyncio.ensure_future(services.wait_change(timeout_s))}
    try:
        await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
