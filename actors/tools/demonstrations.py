"""Rejection-sampled rollouts as demonstrations: JSON lines that `source.data` reads and `agents.demonstration` trains on.

Invariant: what is trained again are the very tokens that the policy made; the environment's stay untrained. Of the samples
with at least the reward asked for, all are written, or the best one of each group (the first of equals).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import NotInRunError
from physarum.actors.tools.exported import Row
from physarum.actors.tools.exporting import rows
from physarum.actors.tools.recorded import Recorded
from physarum.bus.records import Sample

_KEPT_STATUS: Final = ("completed",)


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, of how many samples."""

    file: str
    samples: int
    demonstrations: int


class _Candidate(msgspec.Struct, frozen=True):
    group: str
    reward: float
    line: bytes


async def export_demonstrations(run: OpenRun, path: Path, min_reward: float, *, best: bool) -> Chosen:
    """Writes `path` whole or not at all. Raises NotInRunError when no sample reaches `min_reward`."""
    recorded = await Recorded.open(run.bus, run.folder)
    aside = path.with_name(f".{path.name}.writing")
    seen, written = 0, 0
    leaders: dict[str, _Candidate] = {}
    with aside.open("wb") as file:
        async for row in rows(run.folder, recorded, 1, recorded.last):
            seen += len(row.execution.samples)
            for one in _candidates(row, min_reward):
                if not best:
                    file.write(one.line)
                    written += 1
                elif one.group not in leaders or one.reward > leaders[one.group].reward:
                    leaders[one.group] = one
        for one in leaders.values():
            file.write(one.line)
            written += 1
        file.flush()
        os.fsync(file.fileno())
    if written == 0:
        aside.unlink()
        raise NotInRunError(
            f"none of {seen} samples of run {run.name} is completed with a reward of at least {min_reward:g}; expected one:"
            " lower --min-reward"
        )
    os.replace(aside, path)
    return Chosen(file=str(path), samples=seen, demonstrations=written)


def _candidates(row: Row, min_reward: float) -> Iterator[_Candidate]:
    task = row.execution.task
    if task.task_class == "eval":
        return
    for sample in row.execution.samples:
        reward = sample.reward
        if reward is None or reward < min_reward or sample.status not in _KEPT_STATUS or not sample.trainable_tokens:
            continue
        origin = {"task": task.id, "reward": reward, "run": task.run}
        line = {"prompt": segments(sample), "label": task.label, "metadata": origin}
        yield _Candidate(task.group, reward, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def segments(sample: Sample) -> list[dict[str, Any]]:
    """The sample as runs of token ids, trained where the policy made them."""
    mask = np.concatenate([np.zeros(sample.prompt_len, np.bool_), sample.loss_mask])
    bounds = [0, *(np.flatnonzero(np.diff(mask.view(np.int8))) + 1).tolist(), len(mask)]
    ids = sample.token_ids.tolist()
    return [{"ids": ids[start:end], "train": bool(mask[start])} for start, end in itertools.pairwise(bounds)]
