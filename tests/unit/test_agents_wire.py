"""What an engine reports is believed only where it is one to one with its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from physarum.agents.engine_wire import Reply, build_request, parse_reply
from physarum.agents.errors import EngineReplyError
from physarum.bus.version import Span


def reply(**meta: Any) -> Reply:
    """A sound 0.5.23 reply of tokens 5, 6 to a prompt of 3 tokens, changed by `meta`."""
    body = {
        "text": "xy",
        "output_ids": [5, 6],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": 6},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "weight_version": "p@0.2",
            "weight_versions": [
                {"version": "p@0.1", "start": 0, "end": 1},
                {"version": "p@0.2", "start": 1, "end": 2},
            ],
            "output_token_logprobs": [[-0.25, 5, None], [-0.5, 6, None]],
            **meta,
        },
    }
    return parse_reply(orjson.dumps(body), "http://e", 3, lambda label: f"oldest-{label}")


def test_a_sound_reply() -> None:
    sound = reply()
    assert sound.token_ids.tolist() == [5, 6]
    assert sound.logprobs.tolist() == [-0.25, -0.5]
    assert sound.spans == [Span("p@0.1", 0, 1), Span("p@0.2", 1, 2)]
    assert (sound.finish_reason, sound.cached_tokens, sound.flaw) == ("stop", 1, None)


def test_an_engine_without_weight_versions_gets_the_conservative_label() -> None:
    assert reply(weight_versions=None).spans == [Span("oldest-p@0.2", 0, 2)]


@pytest.mark.parametrize(
    ("meta", "flaw"),
    [
        ({"output_token_logprobs": [[-0.25, 5, None]]}, "logprobs_count"),
        ({"output_token_logprobs": [[-0.25, 5, None], [-0.5, 7, None]]}, "logprobs_token_mismatch"),
        ({"weight_versions": [{"version": "p@0.1", "start": 0, "end": 1}]}, "spans_incomplete"),
        ({"prompt_tokens": 2}, "prompt_altered"),
    ],
)
def test_a_report_that_does_not_match_its_tokens_is_named_and_not_trainable(meta: dict[str, Any], flaw: str) -> None:
    flawed = reply(**meta)
    assert flawed.flaw == flaw
    assert np.isnan(flawed.logprobs).tolist() == [True, True]
    assert flawed.spans[-1].end == 2


def test_one_missing_logprob_loses_one_token() -> None:
    flawed = reply(output_token_logprobs=[[None, 5, None], [-0.5, 6, None]])
    assert flawed.flaw == "logprobs_missing"
    assert np.isnan(flawed.logprobs).tolist() == [True, False]


def test_a_request_aborted_while_it_waited() -> None:
    """0.5.23 sends no prompt_tokens then, and one empty span."""
    body = {
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "p@0.2",
            "weight_versions": [{"version": "p@0.2", "start": 0, "end": 0}],
            "output_token_logprobs": [],
            "completion_tokens": 0,
        },
    }
    waited = parse_reply(orjson.dumps(body), "http://e", 3, str)
    assert (waited.finish_reason, waited.spans, waited.token_ids.tolist(), waited.flaw) == ("abort", [], [], None)


def test_an_engine_that_reports_one_version_per_reply_gives_conservative_spans() -> None:
    """SGLang 0.5.15 names the version live at the end; the caller says which one may be the oldest."""
    body = {
        "text": "",
        "output_ids": [5, 6],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": 6},
            "weight_version": "p@0.3",
            "output_token_logprobs": [[-0.5, 5, None], [-0.5, 6, None]],
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 0,
        },
    }
    seen: list[str] = []

    def oldest(label: str) -> str:
        seen.append(label)
        return "p@0.2"

    made = parse_reply(orjson.dumps(body), "http://e", 3, oldest)
    assert (made.spans, made.conservative, made.flaw) == ([Span("p@0.2", 0, 2)], True, None)
    assert set(seen) == {"p@0.3"}
    assert not reply().conservative


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"output_ids": [1]}', b'{"error": {"message": "no"}}'])
def test_what_is_not_a_reply_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(EngineReplyError, match="http://e answered HTTP 200 with something that is not a reply"):
        parse_reply(body, "http://e", 3, str)


def test_the_request_as_sglang_expects_it() -> None:
    sent = orjson.loads(build_request(np.asarray([1, 2], np.int32), {"temperature": 1.0}, "rid-1", None))
    assert sent == {
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 1.0},
        "return_logprob": True,
        "rid": "rid-1",
        "stream": False,
    }
    assert orjson.loads(build_request(np.asarray([1], np.int32), {}, "r", "p@0.2"))["extra_key"] == "p@0.2"
