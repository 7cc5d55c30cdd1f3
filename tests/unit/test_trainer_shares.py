"""Every parameter of a version has exactly one rank that brings it, and all ranks bring about the same number."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.exporting import Exported
from physarum.actors.trainer.megatron.model import Model
from physarum.actors.trainer.megatron.shares import holders, own_share, writer


def parallel(tp: int, copies: int, pp: int, ep: int, etp: int) -> Parallel:
    groups: dict[str, Any] = dict.fromkeys(("tp_group", "cp_group", "dp_group", "pp_group", "etp_group", "device"))
    places = dict.fromkeys(("rank", "tp_rank", "cp_rank", "dp_rank", "pp_rank"), 0)
    return Parallel(ranks=tp * copies * pp, tp=tp, cp=1, dp=copies, pp=pp, ep=ep, etp=etp, **places, **groups)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2]), st.data())
def test_one_rank_of_one_replica_brings_each(tp: int, copies: int, pp: int, data: st.DataObject) -> None:
    etp = data.draw(st.sampled_from([1, tp]))
    ep = data.draw(st.sampled_from([one for one in (1, 2, 4) if (tp * copies) % (etp * one) == 0]))
    place = parallel(tp, copies, pp, ep, etp)
    for stage in range(pp):
        for name, rank in (("mlp.linear", 0), *((".experts.local_experts.0", rank) for rank in range(ep))):
            which, brought = Exported(name, stage, rank), Counter[int]()
            for index in range(tp * copies * 4):
                ranks = holders(which, index, place)
                assert writer(which, index, place) in ranks
                assert len(ranks) == (etp if which.is_expert else tp)
                assert stage * place.stage_ranks <= ranks[0] and ranks[-1] < (stage + 1) * place.stage_ranks
                brought[writer(which, index, place)] += 1
            assert max(brought.values()) == min(brought.values()), "spread over all ranks that can"
            assert len(brought) == place.stage_ranks // (ep if which.is_expert else 1)


@pytest.mark.parametrize("index", range(8))
def test_experts_are_brought_by_ranks_that_hold_them(index: int) -> None:
    place = parallel(tp=2, copies=4, pp=1, ep=2, etp=1)
    for rank in range(2):
        (found,) = holders(cast(Any, Exported)(".experts.local_experts.3", 0, rank), index, place)
        assert found % 2 == rank


def test_the_bridge_is_asked_for_its_names_once_whatever_is_exported() -> None:
    """It goes through all weights to make them: once for each parameter and version is quadratic in the model."""
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
    asked: list[Any] = []

    class Bridge:
        def _weight_name_mapping_mcore_local_to_global(self, of: Any) -> dict[str, str]:
            asked.append(of)
            return {name: f"decoder.{name}" for name in of.state_dict()}

        def _weight_to_hf_format(self, name: str, tensor: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
            return [f"model.{name}"], [tensor]

    module.share_embeddings_and_output_weights = False  # type: ignore[assignment]
    model = Model(cast(Any, module), cast(Any, module), cast(Any, Bridge()), 8, cast(Any, None))
    place = parallel(1, 1, 1, 1, 1)
    exported = [Exported(name, 0, 0) for name in module.state_dict()]
    for _ in range(3):
        named = [one for _, part in own_share(model, exported, place) for one in part]
        assert [name for name, _ in named] == [f"model.decoder.{one.name}" for one in exported]
    assert asked == [module]
