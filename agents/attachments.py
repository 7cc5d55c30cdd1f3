"""Bytes of Parquet files (images) by reference: they stay in the file, and are read where they are used.

{"parquet": path of the file, "row": n from 0, "column": name, "at": keys and indices inside the value}
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from physarum.agents.errors import TaskError

_KEYS: Final = {"parquet", "row", "column", "at"}
_OPEN_FILES: Final = 16


def is_reference(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == _KEYS


def referred(value: Any, path: Path, row: int, column: str, at: Sequence[str | int] = ()) -> Any:
    """`value` with a reference in the place of all bytes in it."""
    if isinstance(value, bytes):
        return {"parquet": str(path), "row": row, "column": column, "at": list(at)}
    if isinstance(value, dict):
        return {key: referred(item, path, row, column, (*at, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [referred(item, path, row, column, (*at, index)) for index, item in enumerate(value)]
    return value


def load(reference: Mapping[str, Any]) -> bytes:
    """What is referred to. Blocks (a row group is read). Raises TaskError where the file is not there, or is another one."""
    try:
        value = _cell(Path(reference["parquet"]), int(reference["row"]), str(reference["column"]))
        for key in reference["at"]:
            value = value[key]
        if isinstance(value, bytes):
            return value
        reason = f"{type(value).__name__} stands there"
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise TaskError(
        f"attachment {dict(reference)} cannot be read ({reason}); expected the file that the source read on every host that"
        " runs episodes. Mount it there under the same path"
    )


def _cell(path: Path, row: int, column: str) -> Any:
    file = _opened(path)
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row < rows:
            return file.read_row_group(group, columns=[column], use_threads=False).column(column)[row].as_py()
        row -= rows
    raise IndexError("the file has fewer rows")


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: Path) -> Any:
    from pyarrow import parquet  # only where there are such attachments

    return parquet.ParquetFile(path, memory_map=True)
