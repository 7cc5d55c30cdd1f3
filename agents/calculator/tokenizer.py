"""A 128-token character vocabulary with chat and tool tokens. Invariant: encoding, then decoding gives the text back.

Ids: 0-8 special tokens, 9-12 roles (one token each), 13 newline, 14-108 printable ASCII, 109 unknown, the rest unused,
so that embedding rows are a multiple of 64. Saved as tokenizer.json + tokenizer_config.json, which AutoTokenizer loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import orjson
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY_SIZE: Final = 128
EOS: Final = "<|im_end|>"
PAD: Final = "<|endoftext|>"
UNKNOWN: Final = "<unk>"
SPECIAL: Final = (
    PAD,
    "<|im_start|>",
    EOS,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
ROLES: Final = ("system", "user", "assistant", "tool")
CHARACTERS: Final = "\n" + "".join(map(chr, range(32, 127)))
MODEL_MAX_LENGTH: Final = 2048
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """Token to id, VOCABULARY_SIZE entries."""
    named = [*SPECIAL, *ROLES, *CHARACTERS, UNKNOWN]
    unused = [f"<unused{token_id}>" for token_id in range(len(named), VOCABULARY_SIZE)]
    return {token: token_id for token_id, token in enumerate([*named, *unused])}


def build_tokenizer() -> Tokenizer:
    """Every character is a token; special tokens and role names are one token wherever they stand."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *ROLES)])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer files of a Hugging Face model folder into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(_config(), option=orjson.OPT_INDENT_2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "additional_special_tokens": [*SPECIAL, *ROLES],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
    }
