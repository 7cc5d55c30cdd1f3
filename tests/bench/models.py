"""Models of benchmarks: shapes of Qwen3 with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from physarum.agents.calculator.tokenizer import save_tokenizer

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "calculator": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                   "head_dim": 32, "intermediate_size": 192, "vocab_size": 128},
    "small": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 32, "intermediate_size": 384, "vocab_size": 32000},
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 64, "intermediate_size": 512, "vocab_size": 4096},
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936},
}  # fmt: skip
"""0.6B and 4B are those of Qwen3-0.6B and Qwen3-4B."""


def qwen3(shape: str, dtype: torch.dtype) -> Any:
    """A Qwen3ForCausalLM with tied embeddings, on the GPU where there is one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=True, dtype=dtype,
                         bos_token_id=None, eos_token_id=1, pad_token_id=0)  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return Qwen3ForCausalLM(config).to(dtype)


def save_qwen3(folder: Path, shape: str) -> int:
    """A folder with weights (bfloat16 with a GPU, else float32) and a tokenizer of 128 characters; the vocabulary's size."""
    qwen3(shape, torch.bfloat16 if torch.cuda.is_available() else torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    return int(SHAPES[shape]["vocab_size"])
