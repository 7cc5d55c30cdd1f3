"""The calculator's vocabulary: 128 ids, one per character, role and special token; text survives the round trip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.agents.calculator.tokenizer import CHARACTERS, ROLES, SPECIAL, build_tokenizer, save_tokenizer, vocabulary
from physarum.agents.errors import TokenizerError
from physarum.agents.tokenizer import FolderTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


def test_ids_by_hand() -> None:
    ids = vocabulary()
    assert len(ids) == 128 == len(set(ids.values()))
    assert (ids["<|endoftext|>"], ids["<|im_start|>"], ids["<|im_end|>"]) == (0, 1, 2)
    assert [ids[role] for role in ROLES] == [9, 10, 11, 12]
    assert (ids["\n"], ids[" "], ids["0"], ids["9"], ids["~"], ids["<unk>"]) == (13, 14, 30, 39, 108, 109)


def test_an_episodes_text_is_split_into_the_expected_tokens(folder: Path) -> None:
    text = "\n<|im_start|>tool\n0579<|im_end|>\n<|im_start|>assistant\n<tool_call>1+2</tool_call>"
    expected = [13, 1, 12, 13, 30, 35, 37, 39, 2, 13, 1, 11, 13, 5, 31, 25, 32, 6]
    assert FolderTokenizer(folder).encode(text) == expected
    assert FolderTokenizer(folder).decode(expected) == text


def test_roles_and_special_tokens_are_one_token_each() -> None:
    tokenizer = build_tokenizer()
    for token in (*SPECIAL, *ROLES):
        assert tokenizer.encode(token).ids == [vocabulary()[token]]


@given(st.lists(st.sampled_from([*SPECIAL, *ROLES, *CHARACTERS]), max_size=40).map("".join))
def test_round_trip(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_character_outside_the_vocabulary_is_unknown_not_lost(folder: Path) -> None:
    assert FolderTokenizer(folder).encode("é") == [109]


def test_auto_tokenizer_loads_it_and_the_chat_template_gives_the_prompt(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    rendered = tokenizer.render([{"role": "user", "content": "123+456="}])
    assert tokenizer.decode(rendered) == "<|im_start|>user\n123+456=<|im_end|>\n<|im_start|>assistant\n"


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        FolderTokenizer(tmp_path).encode("1")


def test_rollout_workers_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, physarum.agents.client, physarum.agents.demonstration, physarum.agents.calculator.episode,"
        " physarum.agents.calculator.model, physarum.agents.tokenizer;"
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
