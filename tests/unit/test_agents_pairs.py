"""Of a pair only tokens of the announced weights are kept, whatever moment its halves take a version at."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.agents import asking
from physarum.agents.client import _arrived
from physarum.agents.engine_wire import Reply
from physarum.agents.errors import EngineReplyError
from physarum.agents.pairs import (
    MovedError,
    Prefill,
    Prefilled,
    PrefillError,
    check_prefilled,
    joined,
    parse_prefilled,
    room_at,
)
from physarum.agents.routing import EngineRef
from physarum.bus.version import Span

V1, V2 = "policy@1.1", "policy@1.2"
EXACT = Prefill(url="http://p", instance="policy-0", host="p", port=9, exact=True)
MIXED = Prefill(url="http://p", instance="policy-0", host="p", port=9, exact=False)


def reply(*spans: tuple[str, int], finish: str = "stop") -> Reply:
    found, start = [], 0
    for version, count in spans:
        found.append(Span(version, start, start + count))
        start += count
    return Reply(
        token_ids=np.arange(7, 7 + start, dtype=np.int32), logprobs=-np.arange(start, dtype=np.float32), spans=found,
        finish_reason=finish, cached_tokens=0, flaw=None,  # type: ignore[arg-type]
    )  # fmt: skip


def prefilled(*versions: str, token: int | None = 7, aborted: bool = False) -> Prefilled:
    return Prefilled(versions=frozenset(versions), first=versions[-1], token=token, aborted=aborted)


def test_a_reply_of_one_version_is_kept_whole() -> None:
    whole = reply((V1, 3))
    assert joined(whole, prefilled(V1), EXACT, V1) is whole
    nothing = reply(finish="abort")
    assert joined(nothing, prefilled(V1), EXACT, V1) is nothing


def test_what_was_made_after_the_decode_server_moved_is_made_again() -> None:
    cut = joined(reply((V1, 2), (V2, 3)), prefilled(V1), EXACT, V1)
    assert (cut.token_ids.tolist(), cut.logprobs.tolist(), cut.spans) == ([7, 8], [0.0, -1.0], [Span(V1, 0, 2)])
    assert cut.finish_reason == "abort", "the client goes on behind them"


def test_a_reply_of_other_weights_than_announced_is_dropped() -> None:
    with pytest.raises(MovedError, match=r"policy@1\.1, which it had announced"):
        joined(reply((V2, 3)), prefilled(V1), EXACT, V1)


@given(st.lists(st.tuples(st.sampled_from([V1, V2]), st.integers(1, 4)), max_size=5))
def test_no_kept_token_carries_another_version(spans: list[tuple[str, int]]) -> None:
    merged: list[tuple[str, int]] = []
    for version, count in spans:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        else:
            merged.append((version, count))
    try:
        kept = joined(reply(*merged), prefilled(V1), EXACT, V1)
    except MovedError:
        assert merged[0][0] == V2
        return
    assert {span.version for span in kept.spans} <= {V1}
    assert len(kept.token_ids) == len(kept.logprobs) == (merged[0][1] if merged else 0)


def test_a_prompt_that_waited_through_an_update_is_refused_at_once() -> None:
    check_prefilled(prefilled(V1), EXACT, V1)
    with pytest.raises(
        PrefillError, match=r"held the request under policy@1\.1, policy@1\.2; it had announced policy@1\.1"
    ):
        check_prefilled(prefilled(V1, V2), EXACT, V1)
    with pytest.raises(PrefillError, match="aborted"):
        check_prefilled(prefilled(V1, aborted=True), MIXED, V1)


def test_in_place_keeps_all_tokens_with_the_label_of_who_made_them() -> None:
    check_prefilled(prefilled(V2), MIXED, V1)
    found = joined(reply((V1, 2), (V2, 1)), prefilled(V2), MIXED, V1)
    assert found.spans == [Span(V2, 0, 1), Span(V1, 1, 2), Span(V2, 2, 3)]
    assert joined(reply((V1, 1), (V2, 1)), prefilled(V2), MIXED, V1).spans == [Span(V2, 0, 2)]


def test_halves_of_different_requests_are_named() -> None:
    with pytest.raises(EngineReplyError, match="made the first token 99"):
        joined(reply((V1, 2)), prefilled(V1, token=99), EXACT, V1)


def test_the_first_half_is_read_with_and_without_spans() -> None:
    meta = {"finish_reason": {"type": "length", "length": 0}, "weight_version": V2}
    old = parse_prefilled(json.dumps({"output_ids": [], "meta_info": meta}).encode(), "http://p")
    assert (old.versions, old.first, old.token, old.aborted) == (frozenset([V2]), V2, None, False)
    waited = meta | {"weight_versions": [{"version": V1, "start": 0, "end": 0}, {"version": V2, "start": 0, "end": 1}]}
    new = parse_prefilled(json.dumps({"output_ids": [5], "meta_info": waited}).encode(), "http://p")
    assert (new.versions, new.first, new.token) == (frozenset([V1, V2]), V2, 5)
    with pytest.raises(EngineReplyError, match="not a reply of /generate"):
        parse_prefilled(b"{}", "http://p")


def test_rooms_are_used_once_and_fit_a_signed_number() -> None:
    rooms = [room_at(EXACT)["bootstrap_room"] for _ in range(200)]
    assert len(set(rooms)) == 200 and all(0 < room < 1 << 63 for room in rooms)
    assert room_at(EXACT) | {"bootstrap_room": 1} == {"bootstrap_host": "p", "bootstrap_port": 9, "bootstrap_room": 1}


@pytest.mark.parametrize(("prefill", "at_end", "kept"), [(MIXED, V2, V1), (EXACT, V1, V1)])
async def test_a_pair_that_reports_no_version_by_token_makes_no_token_look_younger(
    prefill: Prefill, at_end: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one label of SGLang 0.5.15 is the one at the reply's end: in place it would hide the update in the middle."""

    async def post(session: Any, base: str, request: bytes, timeout_s: float, headers: Any = None) -> bytes:
        logprobs = [[-0.5, 7, None], [-0.5, 8, None]]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": at_end, "output_token_logprobs": logprobs}
        return json.dumps({"output_ids": [7, 8], "meta_info": meta}).encode()

    monkeypatch.setattr(asking, "post", post)
    ref = EngineRef("http://d", "policy-1", V1, prefill=prefill)
    found = await asking.ask_pair(None, ref, b"", 3, 5.0, lambda: None)  # type: ignore[arg-type]
    assert found.spans == [Span(kept, 0, 2)] and found.conservative


def test_a_half_that_refused_its_connection_interrupted_nothing() -> None:
    refused = aiohttp.ClientConnectorError(None, OSError("refused"))  # type: ignore[arg-type]
    assert not _arrived(PrefillError("gone", refused)) and not _arrived(refused)
    assert _arrived(PrefillError("moved")) and _arrived(TimeoutError())
