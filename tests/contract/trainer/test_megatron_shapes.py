"""Who holds what: tokens of a shared pack, rows, replicas, and shapes that are refused. No process is started."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias
from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.errors import UnsupportedParallelism
from physarum.actors.trainer.megatron.context import ContextShard, owners, places
from physarum.actors.trainer.megatron.distributed import Parallel, Shape, check_parallelism
from physarum.actors.trainer.megatron.fit import check_fit
from physarum.actors.trainer.megatron.layout import pack_layout
from physarum.actors.trainer.megatron.local_spec import _last_rows
from physarum.actors.trainer.megatron.microbatch import microbatch_tensors
from physarum.actors.trainer.world_config import WorldConfig

NO_GROUP = cast(dist.ProcessGroup, None)
CPU = torch.device("cpu")


def test_each_rank_holds_one_chunk_from_the_front_and_one_from_the_back() -> None:
    owner = owners([8, 4], 2)
    assert owner.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0]
    assert places(owner, 2, 6).tolist() == [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]


def test_positions_are_those_of_the_tokens_held() -> None:
    layout = pack_layout([8, 4, 4], CPU, ContextShard(1, 2, NO_GROUP))
    assert layout.positions.tolist() == [2, 3, 4, 5, 1, 2, 1, 2]
    assert [(group.start, group.count, group.width) for group in layout.groups] == [(0, 1, 8), (8, 2, 4)]


def test_padding_longer_than_a_segment_is_a_group_of_its_own() -> None:
    layout = pack_layout([3, 2, 7], CPU)
    assert [(group.start, group.tokens, group.width) for group in layout.groups] == [(0, 3, 3), (3, 2, 2), (5, 7, 7)]


def test_the_last_queries_of_the_keys_see_what_came_before_them() -> None:
    expected = [[True, True, False], [True, True, True]]
    assert _last_rows(2, 3, CPU).tolist() == expected
    named = _last_rows(2, 3, torch.device("cuda"))  # names the mask, touches no device
    assert isinstance(named, CausalBias)
    query, key, value = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    found = [
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, dropout_p=0.0, enable_gqa=True)
        for mask in (named, torch.tensor(expected))
    ]
    torch.testing.assert_close(found[0], found[1])


def sequence(ids: list[int], prompt: int, mask: list[bool], advantage: float) -> TrainSequence:
    response = len(ids) - prompt
    return TrainSequence(
        np.array(ids, np.int32), prompt, np.array(mask), np.full(response, -1.0, np.float32), advantage, 0
    )


@pytest.mark.parametrize(
    ("rank", "tokens", "rows", "targets"),
    [
        # The longer (5 tokens, padded to 8) first, then the shorter (3, padded to 4): chunks of 2 and of 1.
        (0, [10, 11, 0, 0, 20, 0], [0, 1, 4], [11, 12, 21]),
        (1, [12, 13, 14, 0, 21, 22], [1, 4], [14, 22]),
    ],
)
def test_rows_lie_where_their_positions_are(rank: int, tokens: list[int], rows: list[int], targets: list[int]) -> None:
    shorter = sequence([20, 21, 22], 1, [True, True], 2.0)
    longer = sequence([10, 11, 12, 13, 14], 1, [True, True, False, True], 1.0)
    shard = ContextShard(rank, 2, NO_GROUP)
    found = microbatch_tensors([shorter, longer], [0.5, 0.25], (), 1, CPU, shard=shard)
    assert found.tokens[0].tolist() == tokens
    assert (found.rows.tolist(), found.targets.tolist()) == (rows, targets)
    assert found.weights.tolist() == [0.25, 0.25, 0.25, 0.5, 0.5]  # of all rows, on every rank
    assert found.sequences.ids.tolist() == [1, 1, 1, 0, 0]
    assert found.shared is not None
    assert (found.shared.per_rank, found.shared.order.tolist()) == (3, [0, 1, 3, 2, 4])


@pytest.mark.parametrize(("align", "tokens"), [(1, 2), (3, 6)])
def test_a_microbatch_without_sequences_is_padding(align: int, tokens: int) -> None:
    found = microbatch_tensors([], [], ("age",), align, CPU, shard=ContextShard(0, 2, NO_GROUP))
    assert found.tokens.shape == (1, tokens)
    assert found.rows.numel() == found.weights.numel() == found.columns["age"].numel() == 0


def place(shape: Shape, rank: int) -> Parallel:
    dp = shape.ranks // (shape.tp * shape.pp * shape.cp)
    within, stage = rank % (shape.ranks // shape.pp), rank // (shape.ranks // shape.pp)
    cp_rank, dp_rank = within // shape.tp % shape.cp, within // (shape.tp * shape.cp)
    groups: dict[str, Any] = dict.fromkeys(("tp_group", "cp_group", "dp_group", "pp_group", "etp_group"), NO_GROUP)
    return Parallel(
        rank, shape.ranks, within % shape.tp, shape.tp, cp_rank, shape.cp, dp_rank, dp, stage, shape.pp, shape.ep,
        shape.etp, device=CPU, **groups,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        (Shape(4, tp=2, etp=2), [0, 1, 0, 1]),
        (Shape(4, cp=2), [0, 0, 0, 0]),
        (Shape(4, pp=2), [0, 0, 2, 2]),
        (Shape(4, ep=2), [0, 1, 0, 1]),
        (Shape(4, tp=2, ep=2, etp=1), [0, 1, 0, 1]),
        (Shape(4, tp=2, ep=4, etp=1), [0, 1, 2, 3]),
        (Shape(8, pp=2, ep=2), [0, 1, 0, 1, 4, 5, 4, 5]),
    ],
)
def test_a_share_is_written_once_and_found_by_its_replicas(shape: Shape, first: list[int]) -> None:
    assert [place(shape, rank).first_replica for rank in range(shape.ranks)] == first


def test_the_rank_at_the_same_place_in_another_stage() -> None:
    assert place(Shape(8, tp=2, pp=2), 3).stage_rank(1) == 7
    assert place(Shape(8, tp=2, pp=2), 7).stage_rank(0) == 3


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(3, tp=2, etp=2), r"3 ranks do not divide into copies of tp 2 \* pp 1 \* cp 1 = 2"),
        (Shape(4, tp=2, pp=2, cp=2, etp=2), "make ranks a multiple"),
        (Shape(4, tp=4, etp=2), "etp=2 with tp=4; expected 1 or 4"),
        (Shape(6, pp=2, ep=2), r"3 ranks of a pipeline stage do not divide into etp 1 \* ep 2"),
        (Shape(0), "ranks=0"),
    ],
)
def test_a_shape_that_does_not_divide_is_refused(shape: Shape, message: str) -> None:
    with pytest.raises(UnsupportedParallelism, match=message):
        check_parallelism(shape)


def test_experts_are_cut_like_the_rest_unless_said_otherwise() -> None:
    config = WorldConfig(hf_folder="m", ranks=4, tp=2, ep=2)
    assert Shape.of(config) == Shape(4, tp=2, ep=2, etp=2)


DENSE = Qwen3Config(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=30)
EXPERTS = Qwen3MoeConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=6)

LATENT = DeepseekV3Config(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=30, kv_lora_rank=21
)


@pytest.mark.parametrize(
    ("config", "shape", "overrides", "message"),
    [
        (DENSE, Shape(2, pp=2), {}, "num_hidden_layers 3 does not divide by pp 2"),
        (DENSE, Shape(4, tp=4), {}, "num_key_value_heads 2 does not divide by tp 4"),
        (DENSE, Shape(2, ep=2), {}, "a qwen3 model has no experts"),
        (EXPERTS, Shape(4, ep=4), {}, "num_experts 6 does not divide by ep 4"),
        (LATENT, Shape(4, tp=4), {}, "q_lora_rank 30 does not divide by tp 4"),
        (LATENT, Shape(2, tp=2), {}, "kv_lora_rank \\+ qk_rope_head_dim 85 does not divide by tp 2"),
        (LATENT, Shape(3, ep=3), {}, "n_routed_experts 256 does not divide by ep 3"),
        (EXPERTS, Shape(2, tp=2, etp=2), {"sequence_parallel": False}, "without sequence_parallel"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(
    config: Any, shape: Shape, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedParallelism, match=message):
        check_fit(config, shape, overrides)


def test_stages_of_unequal_size_are_allowed_where_they_are_given() -> None:
    check_fit(DENSE, Shape(2, pp=2), {"num_layers_in_first_pipeline_stage": 1})


def test_a_rank_alone_shares_nothing() -> None:
    alone = place(Shape(1), 0)
    assert alone.shard is None
    assert replace(alone, cp=2).shard == ContextShard(0, 2, NO_GROUP)
