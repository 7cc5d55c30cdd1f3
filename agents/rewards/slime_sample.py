"""One of our samples under the names that slime gives its `Sample`, for functions that were written for it.

Only what a reward may read is here, with slime's meaning (slime/utils/types.py); what has no counterpart is absent, so that a
function that needs it fails by name instead of reading a made-up value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Execution, Sample


class SampleStatus(Enum):
    """slime's `Sample.Status`."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(kw_only=True)
class SlimeSample:
    """`tokens` prompt and response [P + R]; `response` the decoded R tokens, special tokens and the environment's included;
    `loss_mask` 0 or 1 and `rollout_log_probs` [R] (NaN where no engine gave one); `index` the task's number in the order of
    issue, `group_index` the row's number. `outputs` is ours: what the episode reported."""

    Status: ClassVar[type[SampleStatus]] = SampleStatus

    prompt: Any
    tokens: list[int]
    response: str
    response_length: int
    label: Any
    metadata: dict[str, Any]
    status: SampleStatus
    loss_mask: list[int]
    rollout_log_probs: list[float]
    weight_versions: list[str]
    index: int
    group_index: int | None
    reward: Any = None
    remove_sample: bool = False
    outputs: dict[str, Any] = field(default_factory=dict)

    @property
    def effective_response_length(self) -> int:
        return sum(self.loss_mask)


def slime_samples(execution: Execution, tokenizer: FolderTokenizer) -> list[SlimeSample]:
    """One for each sample of the execution, in order."""
    return [_converted(execution, sample, tokenizer) for sample in execution.samples]


def _converted(execution: Execution, sample: Sample, tokenizer: FolderTokenizer) -> SlimeSample:
    task = execution.task
    response = sample.token_ids[sample.prompt_len :]
    row = task.group.rpartition("/")[2]
    return SlimeSample(
        prompt=task.prompt,
        tokens=sample.token_ids.tolist(),
        response=tokenizer.decode(response) if len(response) else "",
        response_length=sample.response_len,
        label=task.label,
        metadata=dict(task.metadata),
        status=SampleStatus(sample.status),
        loss_mask=[int(one) for one in sample.loss_mask],
        rollout_log_probs=sample.logprobs.tolist(),
        weight_versions=list(dict.fromkeys(span.version for span in sample.spans)),
        index=task.ordinal,
        group_index=int(row) if row.isdecimal() else None,
        outputs=dict(sample.outputs),
    )
