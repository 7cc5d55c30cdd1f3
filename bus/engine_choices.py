"""What an engine chose besides the tokens themselves, for the trainer to choose the same: experts, and kept token ids.

Both are arrays of the sample, in the same body as its tokens. A body of that size travels by reference as a whole, so the
message stays small, one digest in its subject keeps all of it alive, and no second blob can be swept, lost or replaced apart
from the tokens that it belongs to.

    routed experts   [prompt_len + R - 1, MoE layers, top-k], uint8 or int16: row t is the routing of token t as an input;
                     the last token of all was never one. All ones (255; -1): nothing recorded, for a whole row. SGLang
                     reports int32 of all layers: who captures it narrows it, and leaves out layers without experts.
    kept tokens      per response token the ids among which it was drawn (top-p, top-k), ragged
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from physarum.bus.errors import RecordError

Array = np.ndarray[Any, Any]

EXPERT_TYPES: Final = ("uint8", "int16")
"""uint8 serves models of up to 255 experts."""


class KeptTokens(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """Ragged rows: row i is ids[offsets[i] : offsets[i + 1]]; an empty row has no record. Raises RecordError."""

    offsets: Array
    """int64 [rows + 1], from 0 up to len(ids)."""
    ids: Array
    """int32."""

    def __post_init__(self) -> None:
        if self.offsets.dtype != np.int64 or self.offsets.ndim != 1 or self.ids.dtype != np.int32 or self.ids.ndim != 1:
            raise RecordError(
                f"kept tokens have offsets {self.offsets.dtype} {self.offsets.shape} and ids {self.ids.dtype}"
                f" {self.ids.shape}; expected int64 [rows + 1] and int32, one dimension each"
            )
        offsets = self.offsets
        if not offsets.size or offsets[0] != 0 or offsets[-1] != self.ids.size or (np.diff(offsets) < 0).any():
            ends = f"from {offsets[0]} to {offsets[-1]}" if offsets.size else "none"
            raise RecordError(
                f"kept tokens have offsets {ends} over {self.ids.size} ids; expected them to ascend from 0 to {self.ids.size}"
            )

    @classmethod
    def of(cls, rows: list[list[int]]) -> KeptTokens:
        """One list of ids per response token."""
        flat = [one for row in rows for one in row]
        return cls(_offsets(np.asarray([len(row) for row in rows], np.int64)), np.asarray(flat, np.int32))

    @classmethod
    def joined(cls, parts: list[KeptTokens]) -> KeptTokens:
        """The rows of all parts, one after another."""
        counts = [part.counts for part in parts] or [np.zeros(0, np.int64)]
        ids = [part.ids for part in parts] or [np.zeros(0, np.int32)]
        return cls(_offsets(np.concatenate(counts)), np.concatenate(ids))

    @classmethod
    def nothing(cls, rows: int) -> KeptTokens:
        """No record of any of `rows` tokens."""
        return cls(np.zeros(rows + 1, np.int64), np.zeros(0, np.int32))

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Array:
        """int64 [rows]: ids of each row."""
        return np.diff(self.offsets)

    def take(self, rows: Array) -> KeptTokens:
        """Those rows (int64 indices), in the order asked for."""
        counts = self.counts[rows]
        offsets = _offsets(counts)
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], counts)
        return KeptTokens(offsets, self.ids[places])


def check_routed_experts(experts: Array, tokens: int) -> None:
    """Shape and type, for a sample of `tokens` tokens, prompt and response. Raises RecordError."""
    if experts.dtype.name not in EXPERT_TYPES or experts.ndim != 3 or len(experts) != tokens - 1:
        raise RecordError(
            f"routed_experts are {experts.dtype} {experts.shape}; expected {' or '.join(EXPERT_TYPES)}"
            f" [{tokens - 1}, MoE layers, top-k]: a row for each of {tokens} tokens but the last, which is no input"
        )


def check_kept_tokens(kept: KeptTokens, response: int) -> None:
    """One row per response token. Raises RecordError."""
    if kept.rows != response:
        raise RecordError(
            f"kept_tokens have {kept.rows} rows; expected {response}, one per response token (empty: no record)"
        )


def _offsets(counts: Array) -> Array:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
