"""Weight versions and spans. `number` counts weight-changing batches; `epoch` is the trainer's fencing token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from physarum.bus.errors import RecordError

_LABEL: Final = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)@([0-9]+)\.([0-9]+)")


class Version(msgspec.Struct, frozen=True, order=True):
    """A policy's weights, ordered by (epoch, number). Text form `policy@3.128`."""

    model: str
    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.model}@{self.epoch}.{self.number}"

    @classmethod
    def parse(cls, label: str) -> Version:
        """Raises RecordError when `label` is not MODEL@EPOCH.NUMBER."""
        match = _LABEL.fullmatch(label)
        if match is None:
            raise RecordError(f"version label {label!r} is not MODEL@EPOCH.NUMBER (for example policy@3.128)")
        return cls(match[1], int(match[2]), int(match[3]))


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) were made by `version` (a label), as the engine itself reported."""

    version: str
    start: int
    end: int


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """A rollback: the trainer took epoch `epoch` and resumed at number `number`."""

    epoch: int
    number: int


def is_withdrawn(version: Version, withdrawals: tuple[Fork, ...]) -> bool:
    """Whether somebody withdrew it: `withdrawals` are (newest epoch then, last number that holds)."""
    return any(version.epoch <= one.epoch and version.number > one.number for one in withdrawals)


def effective_number(version: Version, forks: tuple[Fork, ...]) -> int:
    """min(n, every fork number recorded after the version's epoch).

    Weights that were made after a fork point in an abandoned epoch share only the history up to the fork, so a
    crash never makes tokens look younger than the weights say.
    """
    later = (fork.number for fork in forks if fork.epoch > version.epoch)
    return min((version.number, *later))


def age(version: Version, current_number: int, forks: tuple[Fork, ...] = ()) -> int:
    """Weight-changing steps between the version that made a token and the step about to begin."""
    return current_number - effective_number(version, forks)


def model_of(spans: Sequence[Span]) -> str:
    """The model of the first span; "" where there is none."""
    return spans[0].version.partition("@")[0] if spans else ""


def append_span(spans: list[Span], version: str, count: int) -> None:
    """Grow `spans` by `count` tokens of `version`; joins the last span when the version is the same."""
    if count <= 0:
        return
    start = spans[-1].end if spans else 0
    if spans and spans[-1].version == version:
        spans[-1] = Span(version, spans[-1].start, start + count)
    else:
        spans.append(Span(version, start, start + count))
