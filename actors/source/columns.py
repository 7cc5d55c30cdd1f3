"""From a row as a file has it to the row of a task: prompt, label, metadata, and in that tools and attachments."""

from __future__ import annotations

from typing import Any, Final

import orjson

from physarum.actors.source.tasks import check_sampling
from physarum.configs.data_files import RowError, column
from physarum.configs.rows import ColumnsConfig

_ATTACHED: Final = ("images", "videos", "audios")


def column_names(columns: ColumnsConfig) -> tuple[str, ...]:
    """Every column that is read, the prompt's first."""
    return (columns.prompt, *(name for key, name in columns.model_dump().items() if key != "prompt"))


def task_row(raw: dict[str, Any], columns: ColumnsConfig, place: str) -> dict[str, Any]:
    """Keys `prompt`, and `label`, `metadata` where the row has them. Raises RowError naming `place`."""
    row = {"prompt": column(raw, columns.prompt)}
    label, metadata = column(raw, columns.label), column(raw, columns.metadata)
    if label is not None:
        row["label"] = label
    if metadata is not None and not isinstance(metadata, dict):
        raise RowError(f"{place}: `{columns.metadata}` is {type(metadata).__name__}; expected a mapping")
    further = _further(raw, columns, place)
    check_sampling(metadata or {}, place)
    if metadata is not None or further:
        row["metadata"] = {**(metadata or {}), **further}
    return row


def _further(raw: dict[str, Any], columns: ColumnsConfig, place: str) -> dict[str, Any]:
    found = {key: value for key in _ATTACHED if (value := column(raw, getattr(columns, key))) is not None}
    tools = column(raw, columns.tools)
    if tools is not None:
        found["tools"] = _tools(tools, columns.tools, place)
    return found


def _tools(value: Any, name: str, place: str) -> list[Any]:
    try:
        tools = orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError as error:
        raise RowError(f"{place}: `{name}` is no JSON ({error}); expected a list of function schemas") from None
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise RowError(f"{place}: `{name}` is {type(tools).__name__}; expected a list of function schemas")
    return tools
