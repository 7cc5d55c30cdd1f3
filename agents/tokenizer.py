"""Text to token ids and back, from a model folder. Invariant: special tokens are neither added nor hidden.

`tokenizers` alone (30 ms) serves encode and decode; transformers is imported only when a chat template is rendered.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import orjson
import tokenizers

from physarum.agents.errors import TaskError, TokenizerError
from physarum.agents.protocols import TokenIds


def _json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    found = orjson.loads(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


class FolderTokenizer:
    """protocols.Tokenizer over a Hugging Face model folder. Nothing is read before first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loading = threading.Lock()
        self._loaded: Any = None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: TokenIds) -> str:
        text: str = self._fast.decode([int(token) for token in token_ids], skip_special_tokens=False)
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """May be called from threads. Raises TokenizerError where there is no template, TaskError where it refuses."""
        templated = self._templated
        if templated.chat_template is None and options.get("chat_template") is None:
            raise TokenizerError(
                f"the tokenizer in {self.folder} has no chat template; expected chat_template.jinja there. Name one in"
                " `source.chat.template`"
            )
        try:
            text = templated.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **options,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TaskError(f"the chat template refuses the conversation: {type(error).__name__}: {error}") from error
        return self.encode(text)

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._fast.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

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

    @property
    def _templated(self) -> Any:
        with self._loading:
            if self._loaded is None:
                _ = self._fast  # its absence is named
                from transformers import AutoTokenizer  # seconds to import: only for those who render chat templates

                self._loaded = AutoTokenizer.from_pretrained(self.folder)
            return self._loaded
