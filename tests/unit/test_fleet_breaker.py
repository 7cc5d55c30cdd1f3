"""A breaker: what trips it, one probe at a time, and longer waits while nothing changes."""

from __future__ import annotations

import random

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from hypothesis import given
from hypothesis import strategies as st

from physarum.agents.errors import EngineFailedError, EngineRefusedError, EngineReplyError, OffPinError
from physarum.agents.fleet.breaker import Breaker, BreakerPolicy, Fault, fault_of
from physarum.agents.retries import decorrelated_s

POLICY = BreakerPolicy(failures=3, base_s=1.0, max_s=8.0)


def breaker(seed: int = 0) -> Breaker:
    return Breaker(POLICY, random.Random(seed))


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (aiohttp.ClientConnectorError(ConnectionKey("h", 1, False, True, None, None, None), OSError(111, "")), "connect"),
        (ConnectionRefusedError(), "connect"),
        (TimeoutError(), "timeout"),
        (aiohttp.ServerTimeoutError(), "timeout"),
        (EngineFailedError("u", 503, ""), "server"),
        (aiohttp.ServerDisconnectedError(), "broken"),
        (aiohttp.ClientPayloadError(), "broken"),
        (EngineReplyError("no reply of /generate"), "broken"),
        (EngineRefusedError("u", 400, ""), None),
        (OffPinError("other weights"), None),
    ],
)  # fmt: skip
def test_what_a_failure_says_of_the_engine(error: Exception, fault: Fault | None) -> None:
    assert fault_of(error) == fault


def test_nothing_listens_opens_it_at_once_other_faults_after_three_in_a_row() -> None:
    refused = breaker()
    refused.failed("connect", 0.0)
    assert refused.state(0.0) == "open"
    slow = breaker()
    for fault in ("timeout", "server"):
        slow.failed(fault, 0.0)  # type: ignore[arg-type]
    assert slow.state(0.0) == "closed"
    slow.succeeded()
    slow.failed("timeout", 0.0)
    slow.failed("timeout", 0.0)
    assert slow.state(0.0) == "closed", "not in a row"
    slow.failed("broken", 0.0)
    assert slow.state(0.0) == "open"


def test_half_open_takes_one_probe_and_its_answer_decides() -> None:
    one = breaker()
    one.failed("connect", 0.0)
    assert not one.allows(0.5)
    at = one.probe_at
    assert at is not None and 1.0 <= at <= 3.0
    assert one.allows(at)
    assert one.sent()
    assert not one.allows(at) and one.probe_at is None, "one at a time"
    one.failed("server", at, probe=True)
    assert one.state(at) == "open", "one failed probe is enough"
    again = one.probe_at
    assert again is not None
    one.sent()
    one.given_up()
    assert one.allows(again), "a probe that was cancelled says nothing"
    one.sent()
    one.failed("timeout", again)
    assert not one.allows(again), "not the probe's failure: that is still out"
    one.succeeded()
    assert one.state(again) == "closed" and one.allows(again) and not one.sent()


def test_requests_of_before_do_not_prolong_the_wait() -> None:
    one = breaker()
    one.failed("connect", 0.0)
    at = one.probe_at
    for _ in range(50):
        one.failed("connect", 0.1)
    assert one.probe_at == at


@given(st.integers(0, 1000), st.integers(1, 30))
def test_waits_stay_within_their_bounds_and_grow_at_most_threefold(seed: int, failures: int) -> None:
    rng, before = random.Random(seed), 0.0
    for _ in range(failures):
        wait = decorrelated_s(rng, 1.0, before, 8.0)
        assert 1.0 <= wait <= min(8.0, max(1.0, 3 * before))
        before = wait
