"""Layout of packed segments: positions, groups of like length, and the padding that attention must not see."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.trainer.megatron.layout import pack_layout

CPU = torch.device("cpu")


def test_positions_start_anew_in_every_segment() -> None:
    assert pack_layout([3, 2], CPU).positions.tolist() == [0, 1, 2, 0, 1]


def test_equal_lengths_need_no_copy() -> None:
    (group,) = pack_layout([4, 4], CPU).groups
    assert (group.start, group.tokens, group.count, group.width) == (0, 8, 2, 4)
    assert group.gather is None and group.scatter is None


def test_short_segments_do_not_pad_to_the_longest() -> None:
    groups = pack_layout([16, 14, 5], CPU).groups
    assert [(group.start, group.tokens, group.count, group.width) for group in groups] == [
        (0, 30, 2, 16),
        (30, 5, 1, 5),
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_gather_then_scatter_gives_the_tokens_back(lengths: list[int]) -> None:
    lengths = sorted(lengths, reverse=True)
    tokens = torch.arange(sum(lengths))
    pieces = []
    for group in pack_layout(lengths, CPU).groups:
        rows = tokens[group.start : group.start + group.tokens]
        padded = rows if group.gather is None else rows[group.gather]
        assert padded.numel() == group.count * group.width <= group.tokens * 8 / 7 + group.count
        pieces.append(padded if group.scatter is None else padded[group.scatter])
    assert torch.cat(pieces).tolist() == tokens.tolist()
