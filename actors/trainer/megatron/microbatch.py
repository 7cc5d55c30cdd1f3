"""Sequences of one microbatch as tensors: what a rank's part of the model reads, and the columns of the loss.

Invariant: rows are in the same order on every rank; a context-parallel rank computes those whose positions it holds, and
gets the others' (`shared`), so that the loss sees whole sequences whoever holds their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from physarum.actors.trainer.algorithms.nucleus import KeptRows
from physarum.actors.trainer.algorithms.sequences import Sequences
from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.megatron.context import ContextShard, Indices, SharedRows, owners, places
from physarum.actors.trainer.megatron.layout import PackedLayout, pack_layout
from physarum.actors.trainer.megatron.routing import Routing
from physarum.bus.engine_choices import KeptTokens


@dataclass(frozen=True)
class MicrobatchTensors:
    """T packed tokens and the N response tokens whose log-probabilities are wanted, all on the rank's device.

    Of the tokens a rank holds T / cp, of the rows n <= N (all of them where `shared` is None).
    """

    tokens: Tensor
    """[1, T / cp] int64."""
    layout: PackedLayout
    rows: Tensor
    """[n] index in this rank's tokens of the position whose logits predict the token (the one before it)."""
    targets: Tensor
    """[n] the token ids."""
    shared: SharedRows | None
    weights: Tensor
    """[N] float32: 1 / denominator, see algorithms/reduction.py."""
    columns: dict[str, Tensor]
    """[N] float32 each: `engine`, `advantage`, and the sequences' further columns."""
    sequences: Sequences
    """Whose each of the N rows is; sequences are numbered as the caller gave them."""
    metadata: list[dict[str, Any]]
    """Of each sequence: what hooks were promised."""
    kept: KeptRows | None
    """Of the n rows: ids over which their probability is normalised."""
    origin: Indices
    """[T / cp] place of this rank's tokens in the caller's sequences, one after another; -1 for padding. On the host."""


def microbatch_tensors(
    sequences: Sequence[TrainSequence],
    weights: Sequence[float],
    names: Sequence[str],
    align: int,
    device: torch.device,
    every: bool = False,
    shard: ContextShard | None = None,
    routing: Routing | None = None,
) -> MicrobatchTensors:
    """Tensors of sequences, packed longest first.

    Rows are the trained tokens, or with `every` all response tokens; `names`: the further columns to take along. Every
    rank's part of the pack is padded to a multiple of `align` (sequence parallelism) by one more segment; an empty
    microbatch is padding only. With `shard` each segment is padded too, to be cut into equal chunks. `routing`: of the
    model that will read it, where experts are replayed in that model.
    """
    unit, ranks = (1, 1) if shard is None else (shard.unit, shard.size)
    order = sorted(range(len(sequences)), key=lambda index: -sequences[index].length)
    lengths = [-(-sequences[index].length // unit) * unit for index in order]
    step, total = math.lcm(unit, align * ranks), sum(lengths)
    if padding := -total % step if total else step:
        lengths.append(padding)
    found = _rows(sequences, weights, names, order, lengths, every)
    ids, origin = _tokens(sequences, order, lengths)
    rows, targets, shared = found["row"], found["target"], None
    kept = _kept(sequences, order, every)
    if shard is not None:
        owner = owners(lengths, ranks)
        shared = _shared(owner[rows], shard, device)
        own = np.flatnonzero(owner == shard.rank)
        here = np.flatnonzero(owner[rows] == shard.rank)
        ids, origin, rows, targets = ids[own], origin[own], np.searchsorted(own, rows[here]), targets[here]
        kept = None if kept is None else kept.take(here)
    return MicrobatchTensors(
        tokens=_on(device, ids, torch.int64)[None],
        layout=pack_layout(lengths, device, shard, None if routing is None else routing.told(sequences, origin)),
        rows=_on(device, rows, torch.int64),
        targets=_on(device, targets, torch.int64),
        shared=shared,
        weights=_on(device, found["weight"], torch.float32),
        columns={name: _on(device, found[name], torch.float32) for name in ("engine", "advantage", *names)},
        sequences=Sequences(_on(device, found["owner"], torch.int64), len(sequences)),
        metadata=[sequence.metadata for sequence in sequences],
        kept=None if kept is None else KeptRows(torch.from_numpy(kept.offsets), _on(device, kept.ids, torch.int64)),
        origin=origin,
    )


def _tokens(
    sequences: Sequence[TrainSequence], order: Sequence[int], lengths: Sequence[int]
) -> tuple[Indices, Indices]:
    """[T] token ids of the whole pack, and `origin` of each; padding is token 0."""
    ids, origin = np.zeros(sum(lengths), np.int64), np.full(sum(lengths), -1, np.int64)
    firsts = np.cumsum([0, *(one.length for one in sequences)])
    for index, start in zip(order, np.cumsum([0, *lengths]), strict=False):
        end = start + sequences[index].length
        ids[start:end] = sequences[index].token_ids
        origin[start:end] = np.arange(firsts[index], firsts[index + 1])
    return ids, origin


def _kept(sequences: Sequence[TrainSequence], order: Sequence[int], every: bool) -> KeptTokens | None:
    """Of all rows, in the order of `_rows`; None where no sequence has a record."""
    if all(one.kept_tokens is None for one in sequences):
        return None
    return KeptTokens.joined(
        [
            (one.kept_tokens or KeptTokens.nothing(one.response_len)).take(_chosen(one, every))
            for one in (sequences[index] for index in order)
        ]
    )


def _chosen(sequence: TrainSequence, every: bool) -> Indices:
    """Response tokens that are rows."""
    return np.arange(sequence.response_len) if every else np.flatnonzero(sequence.loss_mask)


def _rows(
    sequences: Sequence[TrainSequence],
    weights: Sequence[float],
    names: Sequence[str],
    order: Sequence[int],
    lengths: Sequence[int],
    every: bool,
) -> dict[str, NDArray[Any]]:
    """[N] of each column: the rows' places in the whole pack, whose segments have `lengths` in `order`."""
    columns = ("row", "target", "owner", "weight", "engine", "advantage", *names)
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in columns}
    start = 0
    for index, length in zip(order, lengths, strict=False):
        sequence = sequences[index]
        chosen = _chosen(sequence, every)
        parts["row"].append(chosen + (start + sequence.prompt_len - 1))
        parts["target"].append(sequence.token_ids[sequence.prompt_len :][chosen])
        parts["owner"].append(np.full(len(chosen), index))
        parts["weight"].append(np.full(len(chosen), weights[index]))
        parts["engine"].append(sequence.engine_logprobs[chosen])
        parts["advantage"].append(sequence.advantages()[chosen])
        for name in names:
            parts[name].append(sequence.columns[name][chosen])
        start += length
    return {name: np.concatenate(pieces) if pieces else np.zeros(0, np.int64) for name, pieces in parts.items()}


def _shared(owner: Indices, shard: ContextShard, device: torch.device) -> SharedRows:
    """`owner` [N]: the rank that computes each row."""
    per_rank = max(1, int(np.bincount(owner, minlength=1).max()))
    return SharedRows(per_rank, _on(device, places(owner, shard.size, per_rank), torch.int64), shard.group)


def _on(device: torch.device, array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array).to(device=device, dtype=dtype)
