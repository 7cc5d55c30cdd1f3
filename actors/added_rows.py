"""Rows that were added to a run while it goes on (`actorctl tasks add`): what stands in ADDED, and how it gets there once.

    FILE --digest of each line--> ph.<run>.added.<digest> (stored only where nothing is) --receipt--> accepted
    ADDED --in its order--> the source's leader, which issues each as a group of tasks before its own next row

Invariant: a line of a file is accepted once, however often the file is given. Equal lines of one file are as many rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from physarum.bus import names
from physarum.bus.codec import encode
from physarum.bus.errors import WrongSequenceError
from physarum.bus.publisher import Publisher

Priority = Literal["p0", "p1"]
"""`p0`: workers take its tasks before any other row's; `p1`: among them."""


class AddedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row as the source issues it, and where it came from (line from 1)."""

    prompt: Any
    label: Any = None
    metadata: dict[str, Any] = {}
    priority: Priority = "p0"
    file: str
    line: int
    at: float

    def row(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "label": self.label, "metadata": self.metadata}


def with_digests(file: Path, lines: Iterable[tuple[int, bytes]], again: str = "") -> Iterator[tuple[int, bytes, str]]:
    """(number, line, digest): xxh3-128 of the file's absolute path, the line, and how often it stood in the file before.

    So lines may be appended to the file or moved in it, and only what is new is new. `again` makes all of it new."""
    seen: Counter[bytes] = Counter()
    for number, line in lines:
        text = line.strip()
        state = xxhash.xxh3_128(f"{file.absolute()}\n{again}\n{seen[text]}\n".encode())
        seen[text] += 1
        state.update(text)
        yield number, line, state.hexdigest()


async def accept(publisher: Publisher, run: str, digest: str, row: AddedRow, deadline_s: float) -> bool:
    """Stores a row; False: it was there. Raises BusRefusedError (too large) or PublishTimeoutError (away, or full)."""
    try:
        await publisher.publish(
            names.subject(run, "added", digest), encode(row), expect_last_subject_sequence=0, deadline_s=deadline_s
        )
    except WrongSequenceError:
        return False
    return True
