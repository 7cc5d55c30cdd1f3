"""Whole numbers that 64 bits do not hold keep all their digits; all else is as orjson reads it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.mathematics import score_math
from physarum.configs import exact_json
from physarum.configs.data_files import RowError, parse_row
from physarum.configs.reward_types import MathReward

LONG = "123456789012345678901234567890"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_what_orjson_holds_is_the_same(value: Any) -> None:
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:  # a lone surrogate
        return
    assert exact_json.loads(text) == orjson.loads(text) and repr(exact_json.loads(text)) == repr(orjson.loads(text))


@pytest.mark.parametrize("number", [LONG, f"-{LONG}", str(2**64), str(-(2**63) - 1), "9" * 300])
def test_longer_ones_are_text(number: str) -> None:
    assert exact_json.loads(f'{{"a": [{number}]}}') == {"a": [number]}


@pytest.mark.parametrize("text", [f"[{LONG}, NaN]", f"[{LONG}", f'["{LONG}\ud800"]'.encode("utf8", "surrogatepass")])
def test_it_is_as_strict(text: str | bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        exact_json.loads(text)


def test_the_right_answer_to_a_long_one_is_right() -> None:
    """It was 1.2345678901234568e+29, and scored 0."""
    row = parse_row(b'{"prompt": "x", "label": %s}' % LONG.encode(), "prompt")
    assert score_math(Answer(text=rf"\boxed{{{LONG}}}", label=row["label"], task="t"), MathReward()) == 1.0


def test_a_prompt_that_is_null_is_no_row() -> None:
    """As in Parquet: it was issued, and its episode had nothing to say."""
    with pytest.raises(RowError, match=r"no `prompt` \(null\)"):
        parse_row(b'{"prompt": null}', "prompt")
