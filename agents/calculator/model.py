"""The quick start's model: a Qwen3 of about 107 thousand parameters with random weights, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from physarum.agents.calculator.tokenizer import EOS, MODEL_MAX_LENGTH, PAD, VOCABULARY_SIZE, save_tokenizer, vocabulary


def build(
    folder: Path,
    *,
    seed: int,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    intermediate: int = 192,
) -> None:
    """Hook `model.factory`: write config, float32 safetensors (tied embeddings) and tokenizer into `folder`.

    Equal arguments give equal weights. The process's own random state is left as it was.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ids = vocabulary()
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        max_position_embeddings=MODEL_MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[EOS],
        pad_token_id=ids[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(folder)
