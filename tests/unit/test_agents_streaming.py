"""Of an answer that comes in chunks every token that was received counts once, and nothing that was not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.agents.choices import Capture
from physarum.agents.engine_wire import Reply, build_request, parse_reply
from physarum.agents.errors import EngineFailedError, EngineRefusedError, EngineReplyError
from physarum.agents.streaming import Events, Received
from physarum.bus.version import Span

PROMPT = 3
NEW = "p@0.1"
TOKENS = [5, 6, 6, 6, 7, 5, 9]


def logprobs(tokens: list[int]) -> list[list[Any]]:
    return [[-position / 8, token, None] for position, token in enumerate(tokens)]


def chunk(start: int, end: int, *, whole: bool = False, tokens: list[int] = TOKENS, **meta: Any) -> dict[str, Any]:
    """Tokens [start, end) as SGLang 0.5.23 sends them; `whole`: without --incremental-streaming-output."""
    begin = 0 if whole else start
    said = {
        "finish_reason": None,
        "prompt_tokens": PROMPT,
        "completion_tokens": end,
        "cached_tokens": 2,
        "num_retractions": 0,
        "weight_version": NEW,
        "output_token_logprobs": logprobs(tokens)[begin:end],
    }
    return {"text": "", "output_ids": tokens[begin:end], "meta_info": {**said, **meta}}


def last(start: int, **options: Any) -> dict[str, Any]:
    count = len(TOKENS)
    spans = [{"version": NEW, "start": 0, "end": 4}, {"version": "p@0.2", "start": 4, "end": count}]
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "p@0.2", "weight_versions": spans}
    return chunk(start, count, **{**meta, **options})


def received(*chunks: dict[str, Any], announced: str = NEW) -> Received:
    made = Received("http://e", announced)
    for one in chunks:
        made.take(orjson.dumps(one))
    return made


def same(found: Reply, expected: Reply) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs.tolist() == expected.logprobs.tolist()
    for name in ("spans", "finish_reason", "cached_tokens", "flaw", "conservative", "retractions"):
        assert getattr(found, name) == getattr(expected, name), name


@given(
    borders=st.sets(st.integers(1, len(TOKENS) - 1)),
    whole=st.booleans(),
    cuts=st.lists(st.integers(0, 4000), max_size=8),
    broken_at=st.integers(0, 4000),
)
def test_wherever_it_is_cut_the_answer_is_that_in_one_piece_and_a_break_keeps_all_whole_chunks(
    borders: set[int], whole: bool, cuts: list[int], broken_at: int
) -> None:
    places = list(pairwise([0, *sorted(borders), len(TOKENS)]))
    chunks = [chunk(start, end, whole=whole) for start, end in places[:-1]] + [last(places[-1][0], whole=whole)]
    events = [b"data: " + orjson.dumps(one) + b"\n\n" for one in chunks] + [b"data: [DONE]\n\n"]
    stream = b": a proxy is here\n\n" + b"".join(events)
    intact, broken = Received("http://e", NEW), Received("http://e", NEW)
    bounds = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    reader = Events()
    for begin, end in pairwise(bounds):
        for event in reader.feed(stream[begin:end]):
            intact.take(event)
    same(intact.reply(PROMPT, str), parse_reply(orjson.dumps(last(0)), "http://e", PROMPT, str))
    assert intact.partial(PROMPT) is None, "what is finished did not break off"

    for event in Events().feed(stream[:broken_at]):
        broken.take(event)
    ends = [len(stream) - sum(map(len, events[index + 1 :])) for index in range(len(chunks))]
    kept = max([0, *(end for (_, end), at in zip(places, ends, strict=True) if at <= broken_at)])
    if kept in (0, len(TOKENS)):
        assert broken.partial(PROMPT) is None
        return
    partial = broken.partial(PROMPT)
    assert partial is not None
    expected = {"finish_reason": {"type": "abort"}, "weight_versions": [{"version": NEW, "start": 0, "end": kept}]}
    same(partial, parse_reply(orjson.dumps(chunk(0, kept, **expected)), "http://e", PROMPT, str))


@pytest.mark.parametrize("held", [1, 3])
@pytest.mark.parametrize("queued", [0, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_an_abort_that_repeats_the_last_token_adds_it_no_second_time(held: int, queued: int, whole: bool) -> None:
    """SGLang's answer to an abort of a request that was put back: its last token and all log-probabilities, here behind chunks
    that waited to be sent (`_handle_abort_req`, `_coalesce_streaming_chunks`)."""
    end = held + queued
    echo = chunk(
        0, end, whole=True, finish_reason={"type": "abort"}, weight_versions=[{"version": NEW, "start": 0, "end": end}]
    )
    if not whole:
        echo["output_ids"] = [*TOKENS[held:end], TOKENS[end - 1]]
        echo["meta_info"]["output_token_logprobs"] = logprobs(TOKENS)[held:end] + logprobs(TOKENS)[:end]
    before = [chunk(0, 1)] if held == 1 else [chunk(0, 1), chunk(1, held, whole=whole)]
    reply = received(*before, echo).reply(PROMPT, str)
    assert reply.token_ids.tolist() == TOKENS[:end]
    assert reply.logprobs.tolist() == [-position / 8 for position in range(end)]
    assert (reply.finish_reason, reply.flaw) == ("abort", None)


def test_an_abort_that_does_not_say_how_many_there_are_adds_none() -> None:
    echo = chunk(1, 2, finish_reason={"type": "abort"}, completion_tokens=None)
    reply = received(chunk(0, 2), echo).reply(PROMPT, str)
    assert (reply.token_ids.tolist(), reply.finish_reason) == (TOKENS[:2], "abort")


def test_only_chunks_with_a_logprob_for_each_token_are_kept() -> None:
    flawed = chunk(2, 4, output_token_logprobs=logprobs(TOKENS)[2:3])
    made = received(chunk(0, 2), flawed, chunk(4, 5))
    partial = made.partial(PROMPT)
    assert partial is not None
    assert (partial.token_ids.tolist(), partial.logprobs.tolist()) == (TOKENS[:2], [0.0, -0.125])
    made.take(orjson.dumps(last(5)))
    whole = made.reply(PROMPT, str)
    assert (whole.flaw, np.isnan(whole.logprobs).all(), len(whole.token_ids)) == ("logprobs_count", True, len(TOKENS))


def test_errors_of_two_chunks_that_cancel_out_are_seen() -> None:
    """Equal tokens, one log-probability too few and then one too many."""
    tokens = [6] * 6
    few = chunk(1, 3, tokens=tokens, output_token_logprobs=logprobs(tokens)[1:2])
    many = chunk(3, 5, tokens=tokens, output_token_logprobs=logprobs(tokens)[2:5])
    end = chunk(5, 6, tokens=tokens, finish_reason={"type": "length"}, weight_versions=None)
    assert received(chunk(0, 1, tokens=tokens), few, many, end).reply(PROMPT, str).flaw == "logprobs_count"


def test_a_missing_logprob_among_repeated_chunks_is_a_flaw_as_it_is_in_one_piece() -> None:
    flawed = last(3, whole=True, output_token_logprobs=logprobs(TOKENS)[1:])
    reply = received(chunk(0, 1), chunk(1, 3, whole=True), flawed).reply(PROMPT, str)
    assert (reply.token_ids.tolist(), reply.flaw) == (TOKENS, "logprobs_count")


def test_a_prompt_that_was_altered_leaves_nothing_to_go_on_from() -> None:
    assert received(chunk(0, 2, prompt_tokens=2)).partial(PROMPT) is None


def test_tokens_under_the_announced_label_are_exactly_of_it_and_later_ones_at_least() -> None:
    exact, newer = chunk(0, 2), chunk(2, 4, weight_version="p@0.2")
    before = received(exact).partial(PROMPT)
    assert before is not None and (before.spans, before.conservative) == ([Span(NEW, 0, 2)], False)
    made = received(exact, newer)
    after = made.partial(PROMPT)
    assert after is not None and (after.spans, after.conservative) == ([Span(NEW, 0, 4)], True)
    pinned = made.partial(PROMPT, exact=True)
    assert pinned is not None and (pinned.token_ids.tolist(), pinned.conservative) == (TOKENS[:2], False)
    made.take(orjson.dumps(chunk(4, 5)))  # the old label again: what came between is no surer for it
    again = made.partial(PROMPT, exact=True)
    assert again is not None and again.token_ids.tolist() == TOKENS[:2]
    assert received(chunk(0, 2, weight_version="p@0.2")).partial(PROMPT, exact=True) is None


def test_kept_tokens_come_with_their_chunks_and_experts_with_the_last() -> None:
    capture = Capture(nucleus=True)
    masks = [[token, 1] for token in TOKENS]
    made = received(
        chunk(0, 2, output_token_sampling_mask=masks[:2]), chunk(2, 3, output_token_sampling_mask=masks[2:3])
    )
    partial = made.partial(PROMPT, capture)
    assert partial is not None and partial.kept is not None and partial.experts is None
    expected = parse_reply(
        orjson.dumps(chunk(0, 3, finish_reason={"type": "abort"}, output_token_sampling_mask=masks[:3])),
        "http://e",
        PROMPT,
        str,
        capture,
    )
    assert expected.kept is not None and partial.kept.ids.tolist() == expected.kept.ids.tolist()
    assert partial.kept.offsets.tolist() == expected.kept.offsets.tolist()
    gap = received(chunk(0, 2), chunk(2, 3, output_token_sampling_mask=masks[2:3])).partial(PROMPT, capture)
    assert gap is not None and gap.kept is None


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ({"error": {"message": "too long", "code": 400}}, EngineRefusedError),
        ({"error": {"message": "busy", "code": 503}}, EngineFailedError),
        (chunk(1, 2, finish_reason={"type": "abort", "status_code": 400, "message": "too long"}), EngineRefusedError),
        (chunk(1, 2, finish_reason={"type": "abort", "status_code": 500, "message": "KV"}), EngineFailedError),
    ],
)
def test_an_error_that_is_sent_as_a_chunk_is_what_its_status_says(sent: dict[str, Any], kind: type[Exception]) -> None:
    made = received(chunk(0, 1))
    with pytest.raises(kind, match="http://e"):
        made.take(orjson.dumps(sent))
    partial = made.partial(PROMPT)
    assert partial is not None and partial.token_ids.tolist() == TOKENS[:1]


@pytest.mark.parametrize(
    "event",
    [
        b"{",
        b"[]",
        b"{}",
        orjson.dumps(chunk(0, 2, completion_tokens=None)),
        orjson.dumps(chunk(2, 3, completion_tokens=4)),
        orjson.dumps(chunk(0, 1, completion_tokens=1)),
        orjson.dumps(chunk(2, 5, completion_tokens=3)),
    ],
)
def test_what_is_no_chunk_of_this_answer_is_refused_by_name(event: bytes) -> None:
    """A skipped chunk, one that comes twice, more tokens than it says."""
    made = received(chunk(0, 2))
    with pytest.raises(EngineReplyError, match="http://e sent a chunk that does not belong to its answer"):
        made.take(event)


def test_the_request_says_how_many_tokens_a_chunk_has() -> None:
    sent = orjson.loads(build_request(np.asarray([1], np.int32), {"top_k": 2}, "r", None, None, 64))
    assert (sent["stream"], sent["sampling_params"]) == (True, {"top_k": 2, "stream_interval": 64})
