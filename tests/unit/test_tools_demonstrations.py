"""Samples become demonstrations: the same tokens, trained where the policy made them."""

from __future__ import annotations

import numpy as np

from physarum.actors.tools.demonstrations import segments
from physarum.agents.demonstration import demonstration
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Sample
from physarum.bus.version import Span


def test_a_multi_turn_sample_comes_back_token_for_token() -> None:
    """[prompt 1 2 | policy 3 4 | environment 5 | policy 6 | environment 7]."""
    mask = np.array([True, True, False, True, False])
    sample = Sample(
        token_ids=np.arange(1, 8, dtype=np.int32),
        prompt_len=2,
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        spans=[Span("policy@1.0", 0, 5)],
    )
    found = segments(sample)
    assert found == [
        {"ids": [1, 2], "train": False},
        {"ids": [3, 4], "train": True},
        {"ids": [5], "train": False},
        {"ids": [6], "train": True},
        {"ids": [7], "train": False},
    ]
    made = demonstration(found, FolderTokenizer(__file__), "test")  # type: ignore[arg-type]  # ids need no tokenizer
    assert made.token_ids.tolist() == sample.token_ids.tolist()
    assert (made.prompt_len, made.loss_mask.tolist()) == (2, mask.tolist())
