"""One entry of a `data:` list: a file, a folder or a pattern, and the slice of its rows that is meant.

`train.jsonl[100:2000]` (or `train.jsonl@[100:2000]`) means rows 100 to 1999 of everything that the entry names, in the order of
its files, counted from 0 as in Python; negative numbers count from the end. Other brackets are parts of a pattern.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from physarum.configs.types import refuse

Kind = Literal["jsonl", "gzip", "zstd", "parquet"]

_KINDS: Final[dict[str, Kind]] = {".parquet": "parquet", ".gz": "gzip", ".zst": "zstd"}
FOLDER_PATTERNS: Final = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
_SLICE: Final = re.compile(r"(?P<path>.+?)@?\[(?P<start>-?\d*):(?P<stop>-?\d*)\]", re.DOTALL)
_MEANT: Final = re.compile(r".+(@\[[^\]]*|\[[^\]]*:[^\]]*)\]?", re.DOTALL)
_EXPECTED: Final = "a path, or a path and a slice of its rows such as `train.jsonl[100:2000]`"


class DataEntry(NamedTuple):
    """`rows` None: all of them."""

    path: Path
    rows: slice | None


def kind_of(path: Path) -> Kind:
    """By the end of the name; whatever is not known otherwise is JSON lines."""
    return _KINDS.get(path.suffix, "jsonl")


def parse_entry(entry: Path) -> DataEntry:
    """Raises ValueError for a broken slice."""
    text = str(entry)
    match = _SLICE.fullmatch(text)
    if match is None:
        if _MEANT.fullmatch(text):
            raise ValueError(f"{text}: a broken slice")
        return DataEntry(entry, None)
    start, stop = (int(match[name]) if match[name] not in ("", "-") else None for name in ("start", "stop"))
    if "-" in (match["start"], match["stop"]):
        raise ValueError(f"{text}: a minus sign without a number")
    if start is not None and stop is not None and start >= stop and (start < 0) == (stop < 0):
        raise ValueError(f"{text}: a slice that holds no row")
    return DataEntry(Path(match["path"]), slice(start, stop))


def check_entries(value: Any) -> Any:
    """For a validator: refuses broken slices."""
    for entry in value:
        try:
            parse_entry(Path(str(entry)))
        except ValueError as error:
            raise refuse(_EXPECTED, "write [start:stop] behind the path, start before stop", found=str(error)) from None
    return value
