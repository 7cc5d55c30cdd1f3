"""`reward.custom_rm` as a hook: calls a function written for slime's `--custom-rm-path`.

    async def rm(args, sample, **kwargs) -> number | dict       one call for each sample of the execution
    async def rm(args, samples, **kwargs) -> list of them       `reward.batched`: one call with all of them

`args` has the attributes of `reward.args`, and `hf_checkpoint` (the model's folder) unless it is given. Of a dict the entry
`args.reward_key` counts, as in slime; without that key its numbers are parts, summed by `reward.weights`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.slime_sample import slime_samples
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Execution
from physarum.configs.hooks import load_hook
from physarum.configs.types import Arguments

HOOK: Final = "physarum.agents.rewards.custom:score"

Function = Callable[..., Awaitable[Any]]


async def score(execution: Execution, *, function: str, args: Arguments, batched: bool, folder: str) -> list[Any]:
    """Hook: one entry per sample. Raises what the function raises, and RewardError for a result that fits no sample."""
    call, samples = _function(function), slime_samples(execution, _tokenizer(folder))
    given = SimpleNamespace(**{"hf_checkpoint": folder, **args})
    values = await call(given, samples) if batched else await asyncio.gather(*(call(given, one) for one in samples))
    if not isinstance(values, (list, tuple)) or len(values) != len(samples):
        raise RewardError(
            f"{function} returned {values!r:.80} for {len(samples)} samples; expected a list with one reward for each."
            " Remedy: correct the function, or set reward.batched to false"
        )
    return [_chosen(value, args.get("reward_key"), function) for value in values]


def _chosen(value: Any, key: Any, function: str) -> Any:
    if key is None or not isinstance(value, dict):
        return value
    if key not in value:
        raise RewardError(f"{function} returned the keys {sorted(value)}; expected {key!r} (reward.args.reward_key)")
    return value[key]


@functools.cache
def _function(name: str) -> Function:
    found: Function = load_hook(name)  # type: ignore[assignment]  # checked before the start: it is async
    return found


@functools.cache
def _tokenizer(folder: str) -> FolderTokenizer:
    return FolderTokenizer(Path(folder))
