"""How many requests an engine should have at once: additive increase, multiplicative decrease, from its own report.

    KV usage or queue time over its bound, or something was preempted --> limit * `decrease`, then nothing until it is reached
    enough requests to need the limit, and the KV that is to come fits --> limit + what was freed meanwhile
    else                                                              --> as it is

Two things make AIMD (Chiu and Jain, 1989; TCP: Jacobson, 1988) fit for generation, where a request that is let in today fills
its KV minutes later:

* The increase is clocked by what ends, as TCP's is by acknowledgements: KV that requests gave back is the sign that their
  lengths are known by now. Until the first decrease each request that ends lets one more in (the limit doubles in the time in
  which the KV is replaced once), up to as many as would fit if all came to hold what one has held at most; beyond that, and
  after a decrease, the limit grows by `step` of itself in that time.
* KV that is to come is foreseen: while a share g of all new tokens stays (net growth / tokens made; 1 while nothing ends, 0 in
  balance), usage heads for usage * (1 + g), since in a stationary stream what requests have still to make is distributed as
  what they have made (residual life and age of a renewal process are).

Invariant: floor <= limit <= ceiling, and one congestion costs one decrease, however long its requests take to end.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

_MEMORY_PERIODS: Final = 8.0
"""Samples over which net growth is averaged."""
_BINDING: Final = 0.5
"""The limit is taken to hold requests back while at least this share of it is there, as in TCP: a sample of short requests
finds fewer than there are at most."""
_OVERFLOW: Final = 1.15
"""A forecast above this is congestion already: it overestimates where answers are short-tailed, by little."""
_UNKNOWN_CEILING: Final = 1 << 16


class LoadSample(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's report at `at` (monotonic seconds). What a release does not report is None.

    `prefilled_tokens`, `made_tokens`: since its start; `retracted`: requests it put back for want of KV, lately.
    """

    at: float
    running: int
    waiting: int
    used_tokens: int
    capacity_tokens: int | None = None
    made_tokens: float | None = None
    prefilled_tokens: int | None = None
    waiting_tokens: int | None = None
    retracted: int = 0

    @property
    def there(self) -> int:
        return self.running + self.waiting


class LimitRules(msgspec.Struct, frozen=True, kw_only=True):
    """As in `configs.engine.ConcurrencyConfig`; `longest_tokens`: what one request can hold at most, if known."""

    floor: int = 1
    ceiling: int = _UNKNOWN_CEILING
    start: int | None = None
    kv_target: float = 0.8
    queue_target_s: float = 2.0
    decrease: float = 0.85
    step: float = 0.05
    longest_tokens: int | None = None


class Limit:
    """Of one engine; `observe` each sample. `value` is the limit, `reason` what moved it last, for people."""

    def __init__(self, rules: LimitRules, found: float | None = None) -> None:
        """`found`: the limit that engines like this one came to with the same requests; it is begun with."""
        self._rules = rules
        begin = rules.ceiling if rules.start is None else rules.start
        self._exact = float(begin if found is None else found)
        self._knows_lengths = found is not None
        self._calm = True
        self._last: LoadSample | None = None
        self._most_held = 1.0
        self._grown, self._made, self._prefill_rate = 0.0, 0.0, 0.0
        self._queue_since: float | None = None
        self._bound()
        self.queue_s = 0.0
        self.forecast = 0.0
        self.reason = "start"

    @property
    def value(self) -> int:
        return int(self._exact)

    def observe(self, sample: LoadSample) -> int:
        """The limit from now on."""
        last, self._last = self._last, sample
        if last is None or sample.at <= last.at or (sample.made_tokens or 0.0) < (last.made_tokens or 0.0):
            self._begin(sample)
            return self.value
        freed = self._account(last, sample)
        self._most_held = max(self._most_held, sample.used_tokens / max(1, sample.running))
        self._queue(last, sample)
        usage = sample.used_tokens / sample.capacity_tokens if sample.capacity_tokens else 0.0
        known = sample.made_tokens is not None and self._made > 0
        growth = min(1.0, max(0.0, self._grown / self._made)) if known else 0.0
        self.forecast = usage * (1.0 + growth)
        pressed = self._pressed(sample, usage)
        self._calm |= sample.there <= self._exact
        if pressed and self._calm:
            self._shrink(sample, pressed)
        elif not pressed and self._calm and self.forecast <= self._rules.kv_target:
            self._grow(sample, freed)
        return self.value

    def _begin(self, sample: LoadSample) -> None:
        """The first sample (also of a server that was started anew): no more than must fit, whatever the requests do."""
        if sample.capacity_tokens and self._rules.longest_tokens and not self._knows_lengths:
            surely = self._rules.kv_target * sample.capacity_tokens / self._rules.longest_tokens
            self._exact = min(self._exact, math.floor(surely))
            self._bound()

    def _account(self, last: LoadSample, sample: LoadSample) -> float:
        """Tokens of KV that requests gave back since the last sample; averages what stays."""
        made = (sample.made_tokens or 0.0) - (last.made_tokens or 0.0)
        if sample.prefilled_tokens is not None and last.prefilled_tokens is not None:
            prefilled = max(0, sample.prefilled_tokens - last.prefilled_tokens)
            made += prefilled
            self._prefill_rate += (prefilled / (sample.at - last.at) - self._prefill_rate) / _MEMORY_PERIODS
        grown = sample.used_tokens - last.used_tokens
        self._grown += grown - self._grown / _MEMORY_PERIODS
        self._made += made - self._made / _MEMORY_PERIODS
        return max(0.0, made - grown)

    def _queue(self, last: LoadSample, sample: LoadSample) -> None:
        """Queue time by Little's law, L / lambda, in tokens or else in requests, and no longer than since nobody was waiting.

        Where many requests come and go somebody waits in every sample, though nobody for long.
        """
        if not sample.waiting:
            self._queue_since, self.queue_s = None, 0.0
            return
        self._queue_since = last.at if self._queue_since is None else self._queue_since
        bounds = [sample.at - self._queue_since]
        if sample.waiting_tokens is not None and self._prefill_rate > 0:
            bounds.append(sample.waiting_tokens / self._prefill_rate)
        elif (rate := self._ended_per_s(last, sample)) > 0:
            bounds.append(sample.waiting / rate)
        self.queue_s = min(bounds)

    def _ended_per_s(self, last: LoadSample, sample: LoadSample) -> float:
        """Requests, at least: tokens made over the mean length, which is at most twice what those who run hold on average (mean
        residual life of a renewal process). 0 where tokens are not reported."""
        made = (sample.made_tokens or 0.0) - (last.made_tokens or 0.0)
        return made / (sample.at - last.at) * sample.running / (2.0 * sample.used_tokens) if sample.used_tokens else 0.0

    def _pressed(self, sample: LoadSample, usage: float) -> str:
        rules = self._rules
        if sample.retracted:
            return f"{sample.retracted} requests were preempted"
        if usage > (1.0 + rules.kv_target) / 2 or self.forecast > _OVERFLOW:
            return f"KV usage {usage:.2f}, on its way to {self.forecast:.2f}"
        if self.queue_s > rules.queue_target_s:
            return f"{sample.waiting} requests wait, {self.queue_s:.1f} s"
        return ""

    def _shrink(self, sample: LoadSample, reason: str) -> None:
        self._exact = self._rules.decrease * min(self._exact, sample.there)
        self._knows_lengths, self._calm, self.reason = True, False, reason
        self._bound()

    def _grow(self, sample: LoadSample, freed: float) -> None:
        """By the requests' worth of KV that was given back, or by a part of it once congestion was seen."""
        if sample.there < _BINDING * self.value or not sample.used_tokens:
            return
        turned = min(1.0, freed / sample.used_tokens)
        quickly = 0.0 if self._knows_lengths else min((1.0 + turned) * self._exact, self._fits(sample))
        self._exact = max(quickly, (1.0 + turned * self._rules.step) * self._exact)
        self.reason = "room"
        self._bound()

    def _fits(self, sample: LoadSample) -> float:
        """Requests that fit while each holds as much as one held at most until now: they may all be as old at once."""
        return self._rules.kv_target * sample.capacity_tokens / self._most_held if sample.capacity_tokens else math.inf

    def _bound(self) -> None:
        self._exact = max(float(self._rules.floor), min(self._exact, float(self._rules.ceiling)))
