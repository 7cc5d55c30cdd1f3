"""Which executions and groups are trained, decided from headers.

Invariant: a rejected group is always answered for: it is dropped(filtered) by the planner, and after `max_rejected` in a row
the run stops by name or the next one is kept, so a filter that lets nothing pass is never an endless loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from physarum.actors.errors import UnrecoverableError
from physarum.actors.trainer.algorithms.filters import is_informative, is_within_pass_rate
from physarum.bus.records import ExecutionHeader
from physarum.configs import filters as config
from physarum.configs.hooks import load_hook

Headers = Sequence[ExecutionHeader]
Accept = Callable[[Headers], bool]


class Filters:
    """The configured filters of one planner. `rejected` and `kept` count by the filter's name, since the start."""

    def __init__(self, chosen: config.FiltersConfig) -> None:
        self._groups = [(one.kind, _accept(one)) for one in chosen.groups]
        self._executions = [(one.kind, _accept(one)) for one in chosen.executions]
        self._limit, self._keeps = chosen.max_rejected, chosen.when_insufficient == "keep"
        self._in_a_row = 0
        self._last = ""
        self.rejected: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()

    @property
    def any(self) -> bool:
        """Whether anything is filtered at all."""
        return bool(self._groups or self._executions)

    @property
    def keeps_next(self) -> bool:
        """Whether the limit is reached, and the next group is trained whatever the filters say."""
        return self._keeps and self._in_a_row >= self._limit

    def execution(self, header: ExecutionHeader) -> bool:
        """Whether an execution has a part in its group. At the limit it has, where the next group is kept then."""
        refused = _first_refusal(self._executions, [header])
        if refused is None:
            return True
        if self.keeps_next:
            self.kept[refused] += 1
            return True
        self.rejected[refused] += 1
        self._last = refused
        return False

    def group(self, headers: Headers) -> bool:
        """Whether a complete group may be trained. Raises UnrecoverableError at the limit, unless the next is kept then."""
        refused = _first_refusal(self._groups, headers)
        if refused is None:
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        if self._in_a_row <= self._limit:
            self.rejected[refused] += 1
            return False
        if not self._keeps:
            raise self._too_many(refused)
        self._in_a_row = 0
        self.kept[refused] += 1
        return True

    def vanished(self) -> None:
        """A group left whole because its executions were rejected one by one. Raises UnrecoverableError as `group` does."""
        self._in_a_row += 1
        if self._in_a_row > self._limit and not self._keeps:
            raise self._too_many(self._last)

    def _too_many(self, name: str) -> UnrecoverableError:
        return UnrecoverableError(
            f"filter {name} rejected {self._in_a_row} groups one after the other (filters.max_rejected ="
            f" {self._limit}; rejected since the start: {dict(self.rejected)}); expected one that passes. Loosen the"
            " filter, change the tasks' difficulty, or set `filters.when_insufficient: keep`"
        )

    def metrics(self) -> dict[str, float]:
        """`filtered/NAME`: rejected since the start; `filtered_kept`: groups, or executions, kept although they
        were rejected."""
        found = {f"filtered/{name}": float(count) for name, count in sorted(self.rejected.items())}
        return found | ({"filtered_kept": float(self.kept.total())} if self.kept else {})


def _first_refusal(filters: Sequence[tuple[str, Accept]], headers: Headers) -> str | None:
    return next((name for name, accept in filters if not accept(headers)), None)


def _rewards(headers: Headers) -> list[float]:
    return [one.reward or 0.0 for one in headers]


def _accept(chosen: Any) -> Accept:
    match chosen:
        case config.Informative():
            return lambda headers: is_informative(_rewards(headers), chosen.min_spread)
        case config.PassRate():
            return lambda headers: is_within_pass_rate(_rewards(headers), chosen.low, chosen.high)
        case config.Completed():
            return lambda headers: all(sample.status == "completed" for one in headers for sample in one.samples)
        case config.Length():
            return lambda headers: all(one.trainable <= chosen.max_tokens for one in headers)
        case config.GroupHook():
            hook = load_hook(chosen.hook)
            return lambda headers: bool(hook(headers, **chosen.args))  # type: ignore[operator]
    raise AssertionError(f"no filter for {chosen!r}")
