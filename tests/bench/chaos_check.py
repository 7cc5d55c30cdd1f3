"""Is every token of the weights that its span names? The stub's tokens and the stub's journal both must say so.

Pure but for reading the journal. A token is right when it is the one that the weights of its label make at its position
for its task; a turn is right when the journal holds a reply with these tokens under these labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from physarum.bus.records import Execution, Sample
from tests.stub_engine import stub_tokens

Turn = tuple[str, int, tuple[int, ...], tuple[str, ...]]
"""(task, position of the first token, tokens, label of each)."""


class Journal:
    """What the stubs of a run wrote, all incarnations in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self.weights: dict[str, set[str]] = {}
        self.replies: set[Turn] = set()

    def read_on(self) -> None:
        """Takes in the whole lines that were written since."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            self._take(orjson.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        if record["kind"] == "live":
            self.weights.setdefault(record["label"], set()).add(record["weights"])
        else:
            labels = [span["version"] for span in record["spans"] for _ in range(span["end"] - span["start"])]
            self.replies.add((record["task"], record["start"], tuple(record["tokens"]), tuple(labels)))

    @property
    def ambiguous(self) -> list[str]:
        """Labels that stood for more than one set of weights; "start" is the label before the first update."""
        return [label for label, found in self.weights.items() if len(found) > 1]


def turns(task: str, sample: Sample) -> Iterator[Turn]:
    """The policy's runs of tokens in a sample."""
    labels = [span.version for span in sample.spans for _ in range(span.end - span.start)]
    edges = np.flatnonzero(np.diff(sample.loss_mask.view(np.uint8), prepend=0, append=0))
    for start, end in edges.reshape(-1, 2).tolist():
        first = sample.prompt_len + start
        made = sample.token_ids[first : sample.prompt_len + end].tolist()
        yield task, first, tuple(made), tuple(labels[start:end])


def wrong_tokens(execution: Execution, journal: Journal) -> int:
    """Tokens of an execution that are not those of their label's weights, or that no engine said it made."""
    wrong = 0
    for sample in execution.samples:
        for turn in turns(execution.task.id, sample):
            task, first, made, labels = turn
            if turn not in journal.replies:
                wrong += len(made)
                continue
            for offset, (token, label) in enumerate(zip(made, labels, strict=True)):
                weights = journal.weights.get(label, set())
                wrong += all(token != stub_tokens.token(task, first + offset, one) for one in weights)
    return wrong
