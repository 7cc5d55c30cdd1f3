"""Recorded samples as one file: MessagePack without loss, or JSON lines for people and other tools.

    .msgpack   a stream of binary objects: the head, then one execution after the other (as on the bus)
    .jsonl     one JSON object on each line, the same order; arrays are lists, NaN is null

Invariant: what a MessagePack file gives back equals what was exported, bit for bit; a JSON file gives back the same
values (token ids int32, log-probabilities float32, whose shortest decimal form is exact).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack  # type: ignore[import-untyped]
import msgspec
import numpy as np

from physarum.actors.tools.errors import ArchiveAlteredError, BadLinesError
from physarum.bus.codec import decode, encode
from physarum.bus.errors import CodecError, RecordError
from physarum.bus.records import Execution

FORMAT: Final = "physarum-samples/1"
_LARGEST: Final = 1 << 31
_NAMED: Final = 20
_ARRAYS: Final = {"token_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32}


class Head(msgspec.Struct, kw_only=True):
    """What the samples are of. `config`: the run's configuration as YAML. `forks`: its takeovers, (epoch, number)."""

    format: str = FORMAT
    run: str
    first: int
    last: int
    config: str
    forks: list[tuple[int, int]] = []


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One execution and its sequence in the run's sample log."""

    sequence: int
    execution: Execution


class BadLine(NamedTuple):
    """A line that is no execution; numbers count from 1."""

    number: int
    reason: str


class Writer:
    """Writes to `path`, whose ending names the form. Use as a context manager: the file appears whole or not at all."""

    def __init__(self, path: Path, head: Head) -> None:
        self._path, self._head = path, head
        self._lines = is_lines(path)
        self._aside = path.with_name(f".{path.name}.writing")

    def __enter__(self) -> Writer:
        self._file = self._aside.open("wb")
        self._put(self._head)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._file.close()
        if kind is None:
            self._aside.replace(self._path)
        else:
            self._aside.unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        self._put(row)

    def _put(self, record: Head | Row) -> None:
        if self._lines:
            plain = (
                record
                if isinstance(record, Head)
                else {"sequence": record.sequence, "execution": _plain(record.execution)}
            )
            self._file.write(msgspec.json.encode(plain) + b"\n")
        else:
            self._file.write(msgpack.packb(encode(record)))


def is_lines(path: Path) -> bool:
    """Whether the file's ending names JSON lines. Raises BadLinesError for an ending that names neither form."""
    if path.suffix not in (".jsonl", ".msgpack"):
        raise BadLinesError(
            f"{path} ends in {path.suffix or 'nothing'}; expected .jsonl or .msgpack, which names the form"
        )
    return path.suffix == ".jsonl"


def read_head(path: Path) -> Head:
    """The first record of a file. Raises ArchiveAlteredError for what is no export."""
    for item in _raw(path):
        try:
            head = msgspec.json.decode(item, type=Head) if is_lines(path) else decode(item, Head)
        except (msgspec.DecodeError, CodecError) as error:
            raise ArchiveAlteredError(f"{path} does not begin with the head of an export: {error}") from error
        if head.format != FORMAT:
            raise ArchiveAlteredError(f"{path} is of format {head.format!r}; this version reads {FORMAT!r}")
        return head
    raise ArchiveAlteredError(f"{path} is empty; expected an export")


def read_rows(path: Path) -> Iterator[Row | BadLine]:
    """Every execution in the file; what is none, with the number of its line (or of its record)."""
    lines = is_lines(path)
    for number, item in enumerate(_raw(path), start=1):
        if number == 1 or not item.strip():
            continue
        try:
            yield _from_line(item) if lines else decode(item, Row)
        except (msgspec.DecodeError, CodecError, RecordError, TypeError, ValueError, KeyError) as error:
            yield BadLine(number, str(error))


def refuse_bad(path: Path, bad: list[BadLine]) -> None:
    """Raises BadLinesError naming the first lines that are no executions."""
    if bad:
        named = "\n".join(f"  line {line.number}: {line.reason}" for line in bad[:_NAMED])
        more = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise BadLinesError(
            f"{path} has {len(bad)} lines that are no executions; nothing was imported. Correct them, or leave them out with"
            f" --skip-bad:\n{named}{more}"
        )


def _raw(path: Path) -> Iterator[bytes]:
    lines = is_lines(path)
    with path.open("rb") as file:
        if lines:
            yield from file
            return
        unpacker = msgpack.Unpacker(file, max_bin_len=_LARGEST, max_buffer_size=_LARGEST)
        try:
            for item in unpacker:
                if not isinstance(item, bytes):
                    raise ArchiveAlteredError(
                        f"{path} holds a {type(item).__name__}; expected binary records: no export"
                    )
                yield item
        except (msgpack.exceptions.UnpackException, ValueError) as error:
            raise ArchiveAlteredError(
                f"{path} cannot be read as MessagePack ({error}): no export, or altered"
            ) from error
        if unpacker.tell() != path.stat().st_size:
            raise ArchiveAlteredError(f"{path} ends within a record: it is truncated; export it again")


def _plain(execution: Execution) -> Any:
    return _named(msgspec.to_builtins(execution, enc_hook=_list))


def _list(value: Any) -> Any:
    """Arrays as lists, in a form that says which type they have where no schema does."""
    if isinstance(value, np.ndarray):
        return {"$array": value.dtype.name, "values": _values(value)}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form; export to .msgpack")


def _values(array: np.ndarray[Any, Any]) -> Any:
    if np.issubdtype(array.dtype, np.floating):
        if np.isinf(array).any():
            raise TypeError("an infinite number has no JSON form; export to .msgpack")
        return [None if math.isnan(one) else one for one in array.tolist()] if array.ndim == 1 else array.tolist()
    return array.tolist()


def _named(execution: dict[str, Any]) -> dict[str, Any]:
    """The three arrays of every sample as bare lists: their types are known."""
    for sample in execution["samples"]:
        for name in _ARRAYS:
            sample[name] = sample[name]["values"]
    return execution


def _from_line(line: bytes) -> Row:
    found = msgspec.json.decode(line)
    if not isinstance(found, dict) or not isinstance(found.get("execution"), dict):
        raise ValueError("expected an object with `sequence` and `execution`")
    execution = _restored(found["execution"])
    for sample in execution["samples"]:
        for name, dtype in _ARRAYS.items():
            sample[name] = np.array([math.nan if one is None else one for one in sample[name]], dtype)
    return Row(sequence=int(found["sequence"]), execution=msgspec.convert(execution, Execution))


def _restored(value: Any) -> Any:
    """Undoes `_list` wherever it was needed."""
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$array", "values"}:
        flat = [math.nan if one is None else one for one in value["values"]]
        return np.array(flat, np.dtype(value["$array"]))
    return {name: _restored(item) for name, item in value.items()}
