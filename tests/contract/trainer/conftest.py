"""Small real models and batches for the Megatron contract tests."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_reference import save_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from physarum.actors.trainer.batch import TrainSequence

VOCABULARY = 128


@pytest.fixture(scope="session", autouse=True)
def _only_worlds_are_collected() -> Iterator[None]:
    """Every world collects at its end; what was imported until now need not be looked at each time (0.3 s)."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make (once per kind) a tiny Qwen3 folder: 2 layers, hidden 64, 2 heads."""
    made: dict[tuple[object, ...], Path] = {}

    def make(head_dim: int = 32, kv_heads: int = 1, tied: bool = True, vocabulary: int = VOCABULARY) -> Path:
        key = (head_dim, kv_heads, tied, vocabulary)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            torch.manual_seed(0)
            config = Qwen3Config(
                vocab_size=vocabulary,
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=kv_heads,
                head_dim=head_dim,
                max_position_embeddings=512,
                tie_word_embeddings=tied,
                initializer_range=0.2,
            )
            Qwen3ForCausalLM(config).save_pretrained(made[key])
            (made[key] / "tokenizer_note.txt").write_text("a file beside the weights\n")
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., list[TrainSequence]]:
    """Random sequences of unequal length; two samples share every third execution."""

    def make(count: int = 12, seed: int = 0, vocabulary: int = VOCABULARY) -> list[TrainSequence]:
        random = np.random.default_rng(seed)
        sequences = []
        for index in range(count):
            prompt, response = int(random.integers(1, 9)), int(random.integers(2, 30))
            mask = random.random(response) < 0.7
            engine = np.where(mask, -random.gamma(4.0, 1.0, response), np.nan).astype(np.float32)
            sequences.append(
                TrainSequence(
                    token_ids=random.integers(0, vocabulary, prompt + response).astype(np.int32),
                    prompt_len=prompt,
                    loss_mask=mask,
                    engine_logprobs=engine,
                    advantage=float(random.normal()),
                    execution=index - (index % 3 == 2),
                )
            )
        return sequences

    return make


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with experts."""
    made = tmp_path_factory.mktemp("experts")
    save_model(made)
    return made
