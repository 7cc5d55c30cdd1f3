"""Reward functions as users of slime wrote them, against its names only."""

from __future__ import annotations

from typing import Any


async def length(args: Any, sample: Any, **kwargs: Any) -> float:
    assert sample.status == sample.Status.COMPLETED
    assert len(sample.tokens) >= sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs)
    return args.scale * sample.effective_response_length


async def graded(args: Any, sample: Any, **kwargs: Any) -> dict[str, Any]:
    right = sample.response.removesuffix("<|im_end|>") == sample.label
    return {"score": float(right), "pred": sample.response, "level": sample.metadata["level"]}


async def ranked(args: Any, samples: list[Any], **kwargs: Any) -> list[float]:
    order = sorted(range(len(samples)), key=lambda index: samples[index].response_length)
    return [float(order.index(index)) for index in range(len(samples))]


async def forgetful(args: Any, samples: list[Any], **kwargs: Any) -> float:
    return 1.0


async def curious(args: Any, sample: Any) -> float:
    return float(sample.multimodal_inputs is None)


def not_async(args: Any, sample: Any) -> float:
    return 1.0
