"""What one optimizer step consumes and returns.

Invariant: token ids, loss mask, engine log-probabilities and advantages of a sequence agree in length, checked when the
record is made; the wire form is columnar msgpack with raw little-endian bytes, never pickle. What the engine chose besides
the tokens (bus/engine_choices.py) goes along only where the configuration replays it (replay.py).
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from physarum.actors.trainer.errors import BadSequence
from physarum.bus.engine_choices import KeptTokens, check_kept_tokens, check_routed_experts
from physarum.bus.errors import RecordError

Int32: TypeAlias = NDArray[np.int32]
Float32: TypeAlias = NDArray[np.float32]
Bool: TypeAlias = NDArray[np.bool_]
Experts: TypeAlias = NDArray[np.uint8] | NDArray[np.int16]
"""[T - 1, MoE layers, top-k], see bus/engine_choices.py."""


class TrainSequence(msgspec.Struct, frozen=True, eq=False):
    """One token sequence of a batch: a prompt, then R response tokens.

    An execution may yield several sequences; they share `execution`. Raises BadSequence where lengths or types differ.
    """

    token_ids: Int32
    """[T] prompt and response."""
    prompt_len: int
    """Tokens before the response, at least 1 (the first token of all has no log-probability)."""
    loss_mask: Bool
    """[R], R = T - prompt_len: True where the token carries gradient."""
    engine_logprobs: Float32
    """[R] log-probabilities that the engine reported at sampling, NaN where there is none (environment tokens)."""
    advantage: float | Float32
    """One value for every response token, or [R]. Where advantages are made of returns: the reward."""
    execution: int
    """Index of the execution within the batch."""
    group: int = 0
    """Index of the group within the batch."""
    metadata: dict[str, Any] = {}
    """What hooks of advantage and loss were promised of the task's metadata, unchanged."""
    columns: dict[str, Float32] = {}
    """Further values per response token by name, [R] each (`age`, ...); all sequences of a batch have the same names."""
    routed_experts: Experts | None = None
    """Experts to take; None: those that the router chooses."""
    kept_tokens: KeptTokens | None = None
    """Ids over which each response token's probability is normalised; None (or an empty row): the whole vocabulary."""

    def __post_init__(self) -> None:
        response = len(self.token_ids) - self.prompt_len
        if self.prompt_len < 1 or response < 1:
            raise BadSequence(
                f"{len(self.token_ids)} tokens with a prompt of {self.prompt_len}; "
                "expected a prompt and a response of at least one token each"
            )
        _check("token_ids", self.token_ids, np.int32, len(self.token_ids))
        _check("loss_mask", self.loss_mask, np.bool_, response)
        _check("engine_logprobs", self.engine_logprobs, np.float32, response)
        if isinstance(self.advantage, np.ndarray):
            _check("advantage", self.advantage, np.float32, response)
        for name, column in self.columns.items():
            _check(name, column, np.float32, response)
        try:
            if self.routed_experts is not None:
                check_routed_experts(self.routed_experts, len(self.token_ids))
            if self.kept_tokens is not None:
                check_kept_tokens(self.kept_tokens, response)
        except RecordError as error:
            raise BadSequence(str(error)) from error

    @property
    def length(self) -> int:
        """T: all tokens."""
        return len(self.token_ids)

    @property
    def response_len(self) -> int:
        """R: response tokens."""
        return len(self.loss_mask)

    @property
    def trained_tokens(self) -> int:
        """Response tokens with mask True."""
        return int(self.loss_mask.sum())

    def advantages(self) -> Float32:
        """[R], one advantage per response token."""
        if isinstance(self.advantage, np.ndarray):
            return self.advantage
        return np.full(self.response_len, self.advantage, np.float32)

    def with_columns(self, **columns: Float32) -> "TrainSequence":
        """The same sequence with further columns, or others of the same name."""
        return msgspec.structs.replace(self, columns={**self.columns, **columns})


class StepResult(msgspec.Struct, frozen=True):
    """What one optimizer step did. `loss` and `grad_norm` are of the whole batch, before the update and the clip."""

    loss: float
    grad_norm: float
    tokens_trained: int
    sequences: int
    metrics: dict[str, float]
    seconds: float
    changed: bool = True
    """Whether the policy's weights changed: not while the critic alone warms up."""


def _check(name: str, array: NDArray[Any], dtype: Any, length: int) -> None:
    if array.dtype != dtype or array.shape != (length,):
        raise BadSequence(
            f"{name} is {array.dtype} {array.shape}; expected {np.dtype(dtype)} ({length},), one entry per token"
        )


class _Array(msgspec.Struct, frozen=True, array_like=True):
    """Raw little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> "_Array":
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(little.dtype.str, little.shape, little.tobytes())

    def array(self) -> NDArray[Any]:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class _Columns(msgspec.Struct, frozen=True):
    """Wire form: every field of all sequences, concatenated; what only some sequences have stands apart for each."""

    lengths: list[int]
    prompt_lens: list[int]
    executions: list[int]
    token_ids: bytes
    loss_mask: bytes
    engine_logprobs: bytes
    advantages: bytes
    groups: list[int]
    metadata: list[dict[str, Any]]
    columns: dict[str, bytes]
    routed_experts: list[_Array | None]
    kept_tokens: list[tuple[_Array, _Array] | None]


def encode_sequences(sequences: Sequence[TrainSequence]) -> bytes:
    """Sequences -> msgpack. A scalar advantage becomes one float32 per response token."""
    columns = _Columns(
        lengths=[sequence.length for sequence in sequences],
        prompt_lens=[sequence.prompt_len for sequence in sequences],
        executions=[sequence.execution for sequence in sequences],
        token_ids=_join([sequence.token_ids for sequence in sequences], "<i4"),
        loss_mask=_join([sequence.loss_mask for sequence in sequences], "|b1"),
        engine_logprobs=_join([sequence.engine_logprobs for sequence in sequences], "<f4"),
        advantages=_join([sequence.advantages() for sequence in sequences], "<f4"),
        groups=[sequence.group for sequence in sequences],
        metadata=[sequence.metadata for sequence in sequences],
        columns={
            name: _join([sequence.columns[name] for sequence in sequences], "<f4")
            for name in (sequences[0].columns if sequences else ())
        },
        routed_experts=[
            None if sequence.routed_experts is None else _Array.of(sequence.routed_experts) for sequence in sequences
        ],
        kept_tokens=[_encoded_kept(sequence.kept_tokens) for sequence in sequences],
    )
    return msgspec.msgpack.encode(columns)


def decode_sequences(data: bytes) -> list[TrainSequence]:
    """Inverse of `encode_sequences`; raises msgspec.DecodeError or BadSequence on anything else."""
    columns = msgspec.msgpack.decode(data, type=_Columns)
    token_ids = np.frombuffer(columns.token_ids, "<i4")
    loss_mask = np.frombuffer(columns.loss_mask, "|b1")
    engine_logprobs = np.frombuffer(columns.engine_logprobs, "<f4")
    advantages = np.frombuffer(columns.advantages, "<f4")
    further = {name: np.frombuffer(column, "<f4") for name, column in columns.columns.items()}
    places = zip(
        columns.lengths,
        columns.prompt_lens,
        columns.executions,
        columns.groups,
        columns.metadata,
        columns.routed_experts,
        columns.kept_tokens,
        strict=True,
    )
    sequences, token, response = [], 0, 0
    for length, prompt_len, execution, group, metadata, experts, kept in places:
        end = response + length - prompt_len
        sequences.append(
            TrainSequence(
                token_ids[token : token + length],
                prompt_len,
                loss_mask[response:end],
                engine_logprobs[response:end],
                advantages[response:end],
                execution,
                group,
                metadata,
                {name: column[response:end] for name, column in further.items()},
                None if experts is None else experts.array(),
                None if kept is None else KeptTokens(kept[0].array(), kept[1].array()),
            )
        )
        token, response = token + length, end
    return sequences


def _encoded_kept(kept: KeptTokens | None) -> tuple[_Array, _Array] | None:
    return None if kept is None else (_Array.of(kept.offsets), _Array.of(kept.ids))


def _join(arrays: list[NDArray[Any]], dtype: str) -> bytes:
    return np.concatenate(arrays).astype(dtype, copy=False).tobytes() if arrays else b""
