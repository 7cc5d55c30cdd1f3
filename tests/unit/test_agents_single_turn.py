"""Ordinary chat data: what is rendered for which row, what an answer's text is, and which tasks cannot be run at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from physarum.agents.answers import Extraction, extract
from physarum.agents.calculator.tokenizer import save_tokenizer
from physarum.agents.chat import messages_of, prompt_ids
from physarum.agents.demonstration import generate as demonstrate
from physarum.agents.errors import PromptTooLongError, TaskError, TemplateUnreadableError, TokenizerError
from physarum.agents.protocols import FinishReason, Generation, TokenIds
from physarum.agents.single_turn import generate
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Task
from physarum.bus.version import Span

KWARGS_TEMPLATE = (
    "{{ messages[0]['content'] }}{% if enable_thinking %}<think>{% endif %}{{ tools | length if tools else 0 }}"
)


def task(prompt: Any, **metadata: Any) -> Task:
    return Task(
        id="s/0/0/0",
        run="t",
        source="s",
        ordinal=0,
        group="s/0/0",
        group_size=1,
        member=0,
        prompt=prompt,
        metadata=metadata,
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return FolderTokenizer(folder)


class Says:
    """A client that answers with one text, cut to nothing."""

    sampling: Mapping[str, Any] = {}

    def __init__(self, tokenizer: FolderTokenizer, text: str, finish: FinishReason = "stop") -> None:
        self.tokenizer, self._text, self._finish = tokenizer, text, finish
        self.asked = ""

    async def generate(
        self, token_ids: TokenIds, sampling: Mapping[str, Any] | None = None, *, max_new_tokens: int | None = None
    ) -> Generation:
        self.asked = self.tokenizer.decode(token_ids)
        ids = self.tokenizer.encode(self._text)
        return Generation(
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            spans=[Span("p@0.1", 0, len(ids))],
            finish_reason=self._finish,
            cached_tokens=0,
            prompt_tokens=len(token_ids),
            started_at=0.0,
            finished_at=1.0,
            rid="r",
        )


async def test_a_text_becomes_the_users_turn_and_the_answer_loses_the_token_that_ended_it(
    tokenizer: FolderTokenizer,
) -> None:
    client = Says(tokenizer, "<think>x</think>4<|im_end|>")
    (sample,) = await generate(task("2+2"), client)
    assert client.asked == "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    assert sample.outputs == {"text": "<think>x</think>4"}
    assert sample.loss_mask.all() and sample.status == "completed"
    assert tokenizer.decode(sample.token_ids).endswith("</think>4<|im_end|>"), "what is trained keeps its end"


async def test_a_truncated_answer_keeps_every_token(tokenizer: FolderTokenizer) -> None:
    (sample,) = await generate(task("2+2"), Says(tokenizer, "</think>", finish="length"))
    assert (sample.outputs["text"], sample.status) == ("</think>", "truncated")
    (sample,) = await generate(task("2+2"), Says(tokenizer, "4", finish="abort"))
    assert not sample.trainable


def test_a_system_prompt_goes_before_rows_that_bring_none() -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "q"}]
    chat = {"system_prompt": "common"}
    assert [one["content"] for one in messages_of(task("q", chat=chat))] == ["common", "q"]
    assert messages_of(task(own, chat=chat)) == own
    assert messages_of(task([own[1]])) == [own[1]]


def test_template_kwargs_and_tools_reach_the_template(tokenizer: FolderTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "other.jinja"
    path.write_text(KWARGS_TEMPLATE)
    chat = {"template": str(path), "template_kwargs": {"enable_thinking": True}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert tokenizer.decode(prompt_ids(task("q", chat=chat, tools=[tool]), tokenizer)) == "q<think>1"
    off = {**chat, "template_kwargs": {"enable_thinking": False}}
    assert tokenizer.decode(prompt_ids(task("q", chat=off), tokenizer)) == "q0"


def test_the_chatml_template_is_that_of_models_that_speak_it(tokenizer: FolderTokenizer) -> None:
    path = Path(__file__).resolve().parents[2] / "configs" / "templates" / "chatml.jinja"
    chat = {"system_prompt": "s", "template": str(path)}
    assert prompt_ids(task("q", chat=chat), tokenizer) == prompt_ids(task("q", chat={"system_prompt": "s"}), tokenizer)


@pytest.mark.parametrize("prompt", [7, None, [], ["q"], [{"content": "q"}], {"role": "user"}])
def test_a_prompt_that_is_no_conversation_cannot_be_run(prompt: Any, tokenizer: FolderTokenizer) -> None:
    with pytest.raises(TaskError, match="expected a text, or a list of messages"):
        prompt_ids(task(prompt), tokenizer)


def test_what_cannot_be_rendered_is_named(tokenizer: FolderTokenizer, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="chat template refuses the conversation: UndefinedError"):
        prompt_ids(task([{"role": "user", "content": None}]), tokenizer)
    # Another try, on another host, may have it: with TaskError one host without the file buried every task that it took.
    with pytest.raises(TemplateUnreadableError, match=r"nosuch\.jinja cannot be read"):
        prompt_ids(task("q", chat={"template": str(tmp_path / "nosuch.jinja")}), tokenizer)
    with pytest.raises(TaskError, match=r"metadata\['chat'\] is not what `source\.chat` writes"):
        prompt_ids(task("q", chat={"sytem_prompt": "x"}), tokenizer)
    bare = tmp_path / "bare"
    save_tokenizer(bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match=r"has no chat template; .* Name one in"):
        prompt_ids(task("q"), FolderTokenizer(bare))


async def test_long_prompts_and_images_are_refused_before_an_engine_is_asked(tokenizer: FolderTokenizer) -> None:
    client = Says(tokenizer, "4")
    with pytest.raises(PromptTooLongError, match="a prompt of 33 tokens; expected at most 30"):
        await generate(task("x" * 25), client, max_prompt_tokens=30)
    with pytest.raises(TaskError, match="comes with images"):
        await generate(task("q", images=["a.png"]), client)
    assert client.asked == ""


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("<answer>1</answer> or <answer> 2\n</answer>", "tag", "2"),
        ("it is 2", "tag", None),
        ("<answer></answer>", "tag", None),
        ("<answer>2", "tag", None),
        ("3 and 4 make 7.", "number", "7"),
        ("it is -1,234.50, surely", "number", "-1,234.50"),
        ("1, 2, ", "number", "2"),
        ("none", "number", None),
        (" all of it ", "text", "all of it"),
        ("  ", "text", None),
    ],
)
def test_answers_are_found_or_absent(text: str, how: Extraction, expected: str | None) -> None:
    assert extract(text, how) == expected


async def test_demonstrations_are_rendered_as_their_data_set_asks(tokenizer: FolderTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "plain.jinja"
    path.write_text(
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    turns = [{"role": "user", "content": "2+2", "name": None}, {"role": "assistant", "content": "4"}]
    shown = task(turns, chat={"template": str(path), "system_prompt": "add"})
    (sample,) = await demonstrate(shown, Says(tokenizer, ""))
    assert tokenizer.decode(sample.token_ids) == "s:add\nu:2+2\na:4\n"
    trained = sample.token_ids[sample.prompt_len :][sample.loss_mask]
    assert tokenizer.decode(trained) == "4"
    assert messages_of(task(turns))[0] == {"role": "user", "content": "2+2"}, "a key without a value is no key"
