"""The start model is an ordinary Hugging Face folder, and the same seed gives the same weights."""

from __future__ import annotations

from pathlib import Path

from physarum.agents.calculator.model import build


def test_build_is_deterministic_leaves_the_random_state_and_loads(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = torch.random.get_rng_state()
    build(tmp_path / "a", seed=1)
    build(tmp_path / "b", seed=1)
    build(tmp_path / "c", seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    # embedding 128*64; per layer q 64*64, k and v 64*32, o 64*64, MLP 3*64*192, norms 2*64 + 2*32; last norm 64
    assert model.num_parameters() == 128 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 192) + 64 == 106_944
    assert model.config.tie_word_embeddings
    assert tokenizer.eos_token_id == model.config.eos_token_id == 2
    assert len(tokenizer) == model.config.vocab_size == 128
