"""The rows that sections of the configuration name, as one stream."""

from __future__ import annotations

from typing import Any

import xxhash

from physarum.actors.source.errors import UnusableSourceError
from physarum.actors.source.file_rows import FileRows
from physarum.actors.source.mixture import MixturePartRows, MixtureRows
from physarum.actors.source.rows import HookRows, RowStream
from physarum.actors.source.tasks import check_sampling
from physarum.agents.chat import METADATA_KEY
from physarum.configs.data_files import RowError
from physarum.configs.rows import ChatConfig, ColumnsConfig, RowsConfig
from physarum.configs.source import MixturePart, SourceConfig, whole_weights
from physarum.configs.types import Arguments


def open_source(source: SourceConfig, seed: int) -> RowStream:
    """The rows of the run's source. Raises as open_rows does."""
    if source.mixture is None:
        return open_rows(source, seed, shuffle=source.shuffle)
    parts = [_part(source, part, seed) for part in source.mixture]
    rows = MixtureRows(parts, whole_weights(source.mixture))
    return Described(rows, None, source.metadata) if source.metadata else rows


def _part(source: SourceConfig, part: MixturePart, seed: int) -> MixturePartRows:
    """With a seed of its own: two parts of one generator are not the same rows."""
    own = xxhash.xxh3_64_intdigest(f"{seed}/{part.name}".encode()) >> 33
    shuffle = source.shuffle if part.shuffle is None else part.shuffle
    return MixturePartRows(part.name, open_rows(part, own, shuffle=shuffle, base=source))


def open_rows(
    part: RowsConfig,
    seed: int,
    *,
    shuffle: bool,
    base: RowsConfig | None = None,
    held_out: bool = False,
    extra: Arguments | None = None,
) -> RowStream:
    """`base`: whose `columns` and `chat` hold where `part` has none; `extra`: further arguments of its hook.

    Raises HookError, UnusableSourceError or OSError.
    """
    hook = part.row_hook(held_out=held_out)
    columns = part.columns or (base.columns if base is not None else None) or ColumnsConfig()
    chat = part.chat or (base.chat if base is not None else None)
    rows: RowStream
    if hook is not None:
        rows = HookRows(hook[0], seed, {**hook[1], **(extra or {})}, shuffle=shuffle)
    else:
        assert part.data is not None  # the section's validator: exactly one origin
        rows = FileRows(part.data, columns, seed, shuffle=shuffle)
    return rows if chat is None and not part.metadata else Described(rows, chat, part.metadata)


class Described:
    """Rows with metadata that their section adds."""

    def __init__(self, rows: RowStream, chat: ChatConfig | None, metadata: Arguments) -> None:
        try:
            check_sampling(metadata, "the section's `metadata`")
        except RowError as error:
            raise UnusableSourceError(str(error)) from None
        self._rows, self._chat, self._metadata = rows, chat, metadata

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        return described(self._rows.row(epoch, index), self._chat, self._metadata)


def described(row: dict[str, Any], chat: ChatConfig | None, metadata: Arguments) -> dict[str, Any]:
    """The row with `metadata` over its own, and with what its prompt is rendered with unless it brings that itself."""
    common = {} if chat is None else {METADATA_KEY: chat.model_dump(mode="json")}
    return {**row, "metadata": {**common, **(row.get("metadata") or {}), **metadata}}
