"""Text to token ids and back, from a model folder. Invariant: special tokens are neither added nor hidden.

`tokenizers` alone (30 ms) serves encode and decode; transformers is imported only when a chat template is rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import tokenizers

from physarum.agents.errors import TokenizerError
from physarum.agents.protocols import TokenIds


def _json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    found = orjson.loads(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


class FolderTokenizer:
    """protocols.Tokenizer over a Hugging Face model folder. Nothing is read before first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: TokenIds) -> str:
        text: str = self._fast.decode([int(token) for token in token_ids], skip_special_tokens=False)
        return text

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        text = self._templated.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=add_generation_prompt, tokenize=False
        )
        return self.encode(text)

    @cached_property
    def endings(self) -> frozenset[int]:
        """The tokens that end a turn or fill up: eos and pad of the tokenizer, and eos of the generation settings."""
        named = _json(self.folder / "tokenizer_config.json")
        texts = [named.get("eos_token"), named.get("pad_token")]
        spelled = [text.get("content") if isinstance(text, dict) else text for text in texts]
        ids = [self._fast.token_to_id(text) for text in spelled if isinstance(text, str)]
        generation = _json(self.folder / "generation_config.json").get("eos_token_id")
        ids += generation if isinstance(generation, list) else [generation]
        return frozenset(one for one in ids if isinstance(one, int))

    @cached_property
    def _fast(self) -> tokenizers.Tokenizer:
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{path} does not exist; expected a fast tokenizer beside the model. Save one into the folder with"
                " AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        return tokenizers.Tokenizer.from_file(str(path))

    @cached_property
    def _templated(self) -> Any:
        from transformers import AutoTokenizer  # seconds to import: only for those who render chat templates

        return AutoTokenizer.from_pretrained(self.folder)
