"""Pairs of prefill and decode servers: of one version, by prefix and by room, and each failure counts where it happened."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from test_rollout_router import SOON, Line, load

from physarum.agents.errors import EngineFailedError, NoEngineError
from physarum.agents.pairs import MovedError, PrefillError

pytestmark = pytest.mark.timeout(20)


class Pairs(Line):
    """p-N prefill, d-N decode."""

    def has(self, *names: str, version: str = "policy@1.0", state: str = "ready", limit: int | None = None) -> None:
        for name in names:
            if name.startswith("p"):
                self.says(name, role="prefill", bootstrap_port=9000, version=version, state=state)
            else:
                self.says(name, role="decode", version=version, state=state, load=load(limit))


async def test_a_request_goes_to_both_halves_and_names_where_kv_is() -> None:
    fleet = Pairs()
    fleet.has("p-0", "d-0")
    ref = await fleet.pick()
    assert (ref.url, ref.instance, ref.version, ref.home) == ("http://d-0", "d-0", "policy@1.0", "p-0")
    assert ref.prefill is not None
    assert (ref.prefill.url, ref.prefill.host, ref.prefill.port, ref.prefill.exact) == ("http://p-0", "p-0", 9000, True)


async def test_halves_of_different_versions_are_no_pair() -> None:
    fleet = Pairs()
    fleet.has("p-0", version="policy@1.1")
    fleet.has("d-0", version="policy@1.0")
    why = r"d-0 \(decode, policy@1.0\) is ready, p-0 \(prefill, policy@1.1\) is ready"
    with pytest.raises(NoEngineError, match=why):
        await fleet.pick(deadline_s=0.05)
    waiting = fleet.asks()
    await asyncio.sleep(0)
    fleet.has("d-0", version="policy@1.1")
    assert (await waiting).version == "policy@1.1"


async def test_the_limit_of_the_decode_server_holds_for_the_pair() -> None:
    fleet = Pairs()
    fleet.has("p-0", "p-1")
    fleet.has("d-0", limit=1)
    fleet.has("d-1", limit=1)
    first, second = await fleet.pick(), await fleet.pick()
    assert {first.instance, second.instance} == {"d-0", "d-1"}
    third = fleet.asks()
    await asyncio.sleep(0)
    assert not third.done()
    fleet.router.prefilled(first)  # the prefill server's place is free, the decode server's is not
    await asyncio.sleep(0)
    assert not third.done()
    fleet.router.release(first)
    assert (await third).instance == first.instance


async def test_a_session_stays_with_the_server_that_holds_its_prefix() -> None:
    fleet = Pairs()
    fleet.has("p-0", "p-1", "p-2", "d-0", "d-1")
    homes, halves = set(), set()
    for _ in range(8):
        ref = await fleet.pick(prefers="p-1")
        homes.add(ref.home)
        halves.add(ref.instance)
    assert homes == {"p-1"} and halves == {"d-0", "d-1"}, "what decodes holds no prefix: the lightest of them"


async def test_each_failure_is_counted_where_it_happened() -> None:
    fleet = Pairs(breaker=SOON)
    fleet.has("p-0", "d-0")
    ref = await fleet.pick()
    refused = aiohttp.ClientConnectorError(None, OSError("refused"))  # type: ignore[arg-type]
    fleet.router.failed(ref, PrefillError("gone", refused))
    fleet.router.release(ref)
    engines = fleet.router._engines
    assert engines["p-0"].breaker.probe_at is not None and engines["d-0"].breaker.probe_at is None
    again = await fleet.pick()  # the probe
    fleet.router.prefilled(again)
    fleet.router.served(again, 3)
    fleet.router.release(again)
    assert engines["p-0"].breaker.probe_at is None
    for _ in range(3):
        ref = await fleet.pick()
        fleet.router.prefilled(ref)
        fleet.router.failed(ref, EngineFailedError(ref.url, 500, ""))
        fleet.router.release(ref)
    assert engines["d-0"].breaker.probe_at is not None and engines["p-0"].breaker.probe_at is None


@pytest.mark.parametrize("moved", ["p-0", "d-0"])
async def test_a_half_found_with_other_weights_is_asked_again_after_its_next_word(moved: str) -> None:
    fleet = Pairs()
    fleet.has("p-0", "d-0")
    ref = await fleet.pick()
    fleet.router.prefilled(ref)
    fleet.router.failed(ref, PrefillError("moved") if moved == "p-0" else MovedError("moved"))
    fleet.router.release(ref)
    waiting = fleet.asks()
    await asyncio.sleep(0)
    assert not waiting.done()
    fleet.has("d-0" if moved == "p-0" else "p-0")
    await asyncio.sleep(0)
    assert not waiting.done()
    fleet.has(moved)
    assert (await waiting).home == "p-0"


async def test_a_decode_server_that_hands_over_leaves_the_other_its_pairs() -> None:
    fleet = Pairs()
    fleet.has("p-0", "d-0", "d-1")
    fleet.has("d-0", state="handing over")
    assert {(await fleet.pick()).instance for _ in range(4)} == {"d-1"}
    fleet.has("p-0", state="handing over")
    with pytest.raises(NoEngineError):
        await fleet.pick(deadline_s=0.02)


async def test_what_is_aborted_on_its_way_while_a_half_hands_over_is_no_fault_of_it() -> None:
    """SGLang answers HTTP 500 there; three of them would keep the server out of traffic when it is back."""
    fleet = Pairs()
    fleet.has("p-0", "d-0")
    refs = [await fleet.pick() for _ in range(4)]
    fleet.has("d-0", state="handing over")
    for ref in refs:
        fleet.router.failed(ref, EngineFailedError(ref.url, 500, "Aborted by AbortReq."))
        fleet.router.release(ref)
    fleet.has("d-0")
    assert (await fleet.pick(deadline_s=0.2)).instance == "d-0"


async def test_who_waits_is_served_as_soon_as_a_probed_prefill_server_answers() -> None:
    """Its answer closes the breaker; the decode server goes on with the probe for minutes."""
    fleet = Pairs(breaker=SOON)
    fleet.has("p-0", "d-0")
    ref = await fleet.pick()
    refused = aiohttp.ClientConnectorError(None, OSError("refused"))  # type: ignore[arg-type]
    fleet.router.failed(ref, PrefillError("gone", refused))
    fleet.router.release(ref)
    probe = await fleet.pick()
    waiting = fleet.asks()
    await asyncio.sleep(0.02)
    assert not waiting.done(), "one probe at a time"
    fleet.router.prefilled(probe)
    assert (await asyncio.wait_for(waiting, 1)).home == "p-0"


async def test_encoders_are_never_asked() -> None:
    fleet = Pairs()
    fleet.says("e-0", role="encoder")
    with pytest.raises(NoEngineError):
        await fleet.pick(deadline_s=0.02)
