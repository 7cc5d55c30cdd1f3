"""`classifier`: a sequence classifier gives prompt and answer a number, as a reward model does. SGLang serves it (/classify).

Invariant: what is scored is what the classifier's own template makes of the conversation, or the sample's tokens as they are;
never a part of it. A reply without the number that was asked for is no score.

Each text is a request of its own: the engine batches those that it has at a time, and one that is refused costs no other.
"""

from __future__ import annotations

import asyncio
import functools
import math
from pathlib import Path
from typing import Any, Final

from physarum.agents.chat import METADATA_KEY, Chat, given_messages, with_system_prompt
from physarum.agents.errors import TaskError, TokenizerError
from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.backend import backend_for
from physarum.agents.rewards.errors import BackendReplyError, RewardError
from physarum.agents.tokenizer import FolderTokenizer
from physarum.configs.reward_types import ClassifierReward

PATH: Final = "/classify"


async def score_classifier(answer: Answer, options: ClassifierReward) -> float | None:
    """Raises what Backend.post raises, RewardError for what it cannot read, BackendReplyError for a reply without a score."""
    ids = await asyncio.to_thread(token_ids, answer, options)
    if options.max_tokens is not None and len(ids) > options.max_tokens:
        raise RewardError(
            f"task {answer.task}: prompt and answer are {len(ids)} tokens; expected at most max_tokens = {options.max_tokens}:"
            " a part of them is not what the score would be of. Raise it, or keep answers shorter"
        )
    score = await backend_for(options).post({"input_ids": ids}, functools.partial(score_of, options), PATH)
    return None if score is None else options.scale * score + options.shift


def token_ids(answer: Answer, options: ClassifierReward) -> list[int]:
    """What the classifier reads. Blocks (a first call imports transformers: seconds). Raises RewardError."""
    if options.render == "tokens":
        return [int(one) for one in answer.token_ids]
    if options.model is None:
        raise RewardError("reward.args.model is not set; expected the classifier's folder, with its tokenizer")
    try:
        return _tokenizer(options.model).render(conversation(answer), add_generation_prompt=False)
    except (TokenizerError, TaskError) as error:
        raise RewardError(f"task {answer.task} cannot be rendered for the classifier: {error}") from error


def conversation(answer: Answer) -> list[dict[str, Any]]:
    """The row's prompt as the policy was given it (system prompt included), and the answer."""
    messages = given_messages(answer.prompt)
    if messages is None:
        raise RewardError(
            f"task {answer.task} has a prompt of {type(answer.prompt).__name__}; expected a text or messages. Set"
            " `reward.args.render: tokens` for a classifier that shares the policy's tokenizer"
        )
    chat = Chat(system_prompt=(answer.metadata.get(METADATA_KEY) or {}).get("system_prompt"))
    return [*with_system_prompt(messages, chat), {"role": "assistant", "content": answer.text}]


def score_of(options: ClassifierReward, reply: Any) -> float:
    """The output asked for. Raises BackendReplyError for anything else."""
    outputs = reply.get("embedding") if isinstance(reply, dict) else None
    numbers = outputs if isinstance(outputs, list) else [outputs]
    if not all(isinstance(one, (int, float)) and not isinstance(one, bool) and math.isfinite(one) for one in numbers):
        raise BackendReplyError(f"the classifier answered {reply!r:.200}; expected finite numbers under `embedding`")
    if options.output >= len(numbers):
        raise BackendReplyError(
            f"the classifier has {len(numbers)} outputs; expected more than output = {options.output}. Is it served with"
            " `is-embedding`, and a classifier?"
        )
    return _activated(options.activation, [float(one) for one in numbers if one is not None], options.output)


def _activated(activation: str, outputs: list[float], chosen: int) -> float:
    if activation == "sigmoid":
        return 0.5 * (1 + math.tanh(outputs[chosen] / 2))
    if activation == "softmax":
        largest = max(outputs)
        weights = [math.exp(one - largest) for one in outputs]
        return weights[chosen] / sum(weights)
    return outputs[chosen]


@functools.cache
def _tokenizer(folder: str) -> FolderTokenizer:
    return FolderTokenizer(Path(folder))
