"""Some engines take a version first, and the others only once a gate has let it pass.

    verified --> [a place is free] canary: pause, load, gate --vote--> passed: all others go on
                 [places are taken] wait                        `---> refused: nobody else takes it, canaries go back

One register entry for each group holds the newest version on trial. A canary that cannot load the version gives its place
back, one that dies loses it after `limit_s`, and whoever waits takes it; one refusal refuses the version.
Invariant: no engine but canaries loads a version before it passed; and a version that was withdrawn is none to go back to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Final, Literal

import msgspec

from physarum.bus.errors import BusError, WrongSequenceError
from physarum.bus.register import Entry, Register
from physarum.bus.version import Fork, Version, is_withdrawn
from physarum.weightsync.errors import StaleVersionError, VersionRefusedError

_log = logging.getLogger(__name__)

_LONGEST_WAIT_S: Final = 60.0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Of one group. `takers`: canaries, and until when (Unix seconds) each may last; `votes`: a refusal's reason, or "" for a
    pass; `passed`: the newest label that did, to which engines go back, and `passed_manifest` the digest of its manifest."""

    label: str
    takers: dict[str, float] = {}
    votes: dict[str, str] = {}
    verdict: Literal["open", "passed", "refused"] = "open"
    passed: str | None = None
    passed_manifest: str = ""

    @property
    def reason(self) -> str:
        """Why it was refused."""
        return "; ".join(f"{who}: {why}" for who, why in self.votes.items() if why)

    def holding(self, withdrawn: tuple[Fork, ...]) -> Trial:
        """The same, where what passed was not withdrawn since."""
        if self.passed is None or not is_withdrawn(Version.parse(self.passed), withdrawn):
            return self
        return msgspec.structs.replace(self, passed=None, passed_manifest="")


class Canary:
    """The trials of a group as `me`, one of its engines, takes part in them. `places`: how many canaries a version has;
    `withdrawn`: what the newest head says of older versions."""

    def __init__(self, register: Register[Trial], key: tuple[str, ...], me: str, places: int, limit_s: float) -> None:
        self._register = register
        self._key = key
        self._me = me
        self._places = places
        self._limit_s = limit_s
        self.withdrawn: tuple[Fork, ...] = ()

    async def current(self) -> Trial | None:
        """The newest trial. Raises BusError."""
        return (await self._entry()).value

    def has_place(self, trial: Trial) -> bool:
        """Whether this engine may try the version now, or is trying it."""
        present = _present(trial)
        return trial.verdict == "open" and (self._me in present or self._is_free(trial, len(present)))

    async def admitted(self, label: str) -> bool:
        """Waits until this engine may load `label`; whether as a canary, which must `vote` then.

        Raises VersionRefusedError, StaleVersionError (a newer version is on trial), BusError.
        """
        async with self._register.watch(*self._key) as changed:
            while True:
                changed.clear()
                entry = await self._entry()
                if entry.value is not None and entry.value.passed == label:
                    return False  # also while a newer one is on trial
                trial = _of(entry.value, label)
                if trial.verdict == "refused":
                    raise VersionRefusedError(f"{label} was refused by its canary, {trial.reason}")
                present = _present(trial)
                if self._me in present:
                    return True  # it comes back, with what is left of its time
                if self._is_free(trial, len(present)):
                    takers = {**present, self._me: time.time() + self._limit_s}
                    with contextlib.suppress(WrongSequenceError):  # somebody else was faster: look again
                        await self._put(msgspec.structs.replace(trial, takers=takers), entry.revision)
                        return True
                    continue
                wait_s = min([until - time.time() for until in present.values()], default=_LONGEST_WAIT_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(wait_s, 0.0)):
                        await changed.wait()

    def _is_free(self, trial: Trial, present: int) -> bool:
        """Whether a place is. An open trial lacks a vote at least, also in a run that goes on with fewer places."""
        return present < max(self._places - len(trial.votes), 1)

    async def vote(self, label: str, refusal: str | None, manifest: str = "") -> None:
        """This canary's: None lets it pass. Once all places have voted so the version has passed, with the manifest of this
        digest. Raises BusError."""
        while True:
            entry = await self._entry()
            trial = entry.value
            if trial is None or trial.label != label or trial.verdict != "open":
                return  # this engine was slow and its place another's: a verdict stands, or a newer one is on trial
            votes = {**trial.votes, self._me: refusal or ""}
            takers = {name: until for name, until in trial.takers.items() if name != self._me}
            changed = msgspec.structs.replace(trial, votes=votes, takers=takers)
            if refusal is not None:
                changed = msgspec.structs.replace(changed, verdict="refused")
            elif len(votes) >= self._places:
                changed = msgspec.structs.replace(changed, verdict="passed", passed=label, passed_manifest=manifest)
            with contextlib.suppress(WrongSequenceError):
                await self._put(changed, entry.revision)
                return

    async def leave(self, label: str) -> None:
        """This engine could not load the version: another may take its place. What cannot be given back ends by itself."""
        try:
            while True:
                entry = await self._entry()
                trial = entry.value
                if trial is None or trial.label != label or self._me not in trial.takers:
                    return
                takers = {name: until for name, until in trial.takers.items() if name != self._me}
                with contextlib.suppress(WrongSequenceError):
                    await self._put(msgspec.structs.replace(trial, takers=takers), entry.revision)
                    return
        except BusError as error:
            _log.warning("%s keeps its place as a canary for up to %g s: %s", self._me, self._limit_s, error)

    async def _entry(self) -> Entry[Trial]:
        """As it is to be read; who writes over it so takes out what was withdrawn."""
        entry = await self._register.get(*self._key)
        return Entry(entry.value.holding(self.withdrawn), entry.revision) if entry.value is not None else entry

    async def _put(self, trial: Trial, revision: int) -> None:
        await self._register.compare_and_set(trial, revision, *self._key)


def _present(trial: Trial) -> dict[str, float]:
    """Canaries whose time is not over."""
    return {name: until for name, until in trial.takers.items() if until > time.time()}


def _of(trial: Trial | None, label: str) -> Trial:
    """The trial of `label`: the one there is, or a new one. Raises StaleVersionError when that of a newer version has begun."""
    if trial is None:
        return Trial(label=label)
    if trial.label == label:
        return trial
    if Version.parse(trial.label) > Version.parse(label):
        raise StaleVersionError(f"{label} is not wanted any more: {trial.label} is on trial")
    return Trial(label=label, passed=trial.passed, passed_manifest=trial.passed_manifest)
