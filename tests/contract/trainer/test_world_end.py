"""What an ended world leaves behind: nothing that another one would add to."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.errors import WorldClosed
from physarum.actors.trainer.world import World
from physarum.actors.trainer.world_config import WorldConfig
from physarum.agents.calculator.model import build

pytestmark = pytest.mark.timeout(120)


def _dense(folder: Path) -> None:
    build(folder, seed=0)


def _experts(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_experts=4,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def _sequence(number: int) -> TrainSequence:
    ids = np.arange(3, 15, dtype=np.int32) + number
    return TrainSequence(ids, 4, np.ones(8, np.bool_), np.full(8, np.nan, np.float32), 0.0, number)


@pytest.mark.parametrize("save", [_dense, _experts], ids=["dense", "experts"])
def test_ended_worlds_keep_no_thread_no_descriptor_and_no_model(tmp_path: Path, save: Callable[[Path], None]) -> None:
    """Each process group has threads that poll: some tens of worlds later they took most of a core."""
    save(tmp_path)
    process, left = psutil.Process(), []
    for _ in range(3):
        world = World.start(WorldConfig(hf_folder=str(tmp_path), objective="sft", lr=1e-3))
        assert np.isfinite(world.step([_sequence(0), _sequence(1)]).loss)
        world.close()
        with pytest.raises(WorldClosed):
            world.step([])
        left.append((process.num_threads(), process.num_fds()))
        assert not any(isinstance(kept, GPTModel) for kept in gc.get_objects())
    (threads, descriptors), (threads_before, descriptors_before) = left[2], left[1]
    assert threads <= threads_before
    assert descriptors <= descriptors_before
