"""Problems of reasoning-gym (Stojanovski et al., arXiv 2505.24760) as rows, and its own scorers as the reward.

A generator makes the problem at `index` from `seed + index`; each epoch gets a range of seeds of its own, so that epochs bring
new problems and a position alone defines its row. Held-out and training problems are disjoint: a hash of the question alone
(no seed) decides to which side it belongs, 1 in 16 being held out; each side draws again until it finds one of its own.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson
import xxhash

from physarum.agents.answers import Extraction, extract
from physarum.agents.errors import ProblemSpaceError
from physarum.bus.records import Execution
from physarum.configs.errors import HookError

_log = logging.getLogger(__name__)

HELD_OUT_ONE_IN: Final = 16
_EXTRA: Final = "environments"
# With 1 in 16 held out, 64 misses in a row have probability 1e-77.
_DRAWS: Final = 64
_HELD_OUT_DRAWS: Final = 128
"""Per held-out problem that is wanted; 16 are expected where questions rarely repeat."""
_TRAINING_SEEDS: Final = 1 << 31
"""Training draws from seeds below, held-out problems from those above; some generators refuse seeds of 2**32."""
_KEPT: Final = 4
_TUPLE: Final = "tuple"
# Their generators iterate over sets of text, whose order is another one in each process (found by comparing two).
_HASHED: Final = frozenset(
    {"isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note"}
)


class _Generator:
    """One data set of the library: `entry(start, index)` is the problem of seed `start + index`, 0 <= index < size."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self._name, self._args = name, dict(args)
        self._kept: dict[int, Any] = {}
        self.size = len(self._at(0))

    def entry(self, start: int, index: int) -> dict[str, Any]:
        found: dict[str, Any] = self._at(start)[index]
        return found

    def row(self, entry: dict[str, Any]) -> dict[str, Any]:
        """A task row: the question, the library's answer (None where many are right), and what its scorer needs."""
        metadata = {"environment": self._name, "args": self._args, "entry": _marked(entry)}
        return {"prompt": entry["question"], "label": entry["answer"], "metadata": metadata}

    def _at(self, start: int) -> Any:
        if start not in self._kept:
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[start] = open_dataset(self._name, self._args | {"seed": start})
        return self._kept[start]


class Problems:
    """Hook `source.hook` (`source.environment`): training problems, new ones in every epoch of `args.size` (500) rows."""

    def __init__(self, seed: int, *, name: str, args: Mapping[str, Any] | None = None) -> None:
        """`name`, `args`: as reasoning_gym.create_dataset takes them. Raises HookError naming what does not fit."""
        self._generator = _checked(name, args or {})
        self._first = _hashed("train", seed)

    def __len__(self) -> int:
        return self._generator.size

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        size = self._generator.size
        for draw in range(_DRAWS):
            start = (self._first + (epoch * _DRAWS + draw) * size) % _TRAINING_SEEDS
            entry = self._generator.entry(start, index)
            if not held_out(entry["question"]):
                return self._generator.row(entry)
        raise ProblemSpaceError(f"{_DRAWS} problems in a row are held out; widen the generator's `args`")


class HeldOut:
    """Hook `evaluation.hook` (`evaluation.environment`): distinct problems, equal in every epoch, in no training stream."""

    def __init__(self, seed: int, *, name: str, args: Mapping[str, Any] | None = None, problems: int = 256) -> None:
        """Raises HookError naming what does not fit, ProblemSpaceError where there are not so many problems."""
        generator = _checked(name, args or {})
        found: dict[str, dict[str, Any]] = {}
        for entry in _held_out_entries(generator, seed, problems * _HELD_OUT_DRAWS):
            found.setdefault(entry["question"], generator.row(entry))
            if len(found) == problems:
                break
        else:
            raise ProblemSpaceError(
                f"{name} gave {len(found)} held-out problems in {problems * _HELD_OUT_DRAWS} draws, expected {problems}; ask"
                f" for fewer, or widen its `args` (1 question in {HELD_OUT_ONE_IN} is held out)"
            )
        self._rows = list(found.values())

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        return self._rows[index]


def score(execution: Execution, *, extraction: Extraction = "tag", tag: str = "answer") -> float:
    """Hook `reward.hook`: what the generator's own scorer says of the last sample's `text`, in [0, 1].

    Of the text, the answer is what answers.extract finds; a scorer that an answer makes raise has not accepted it.
    """
    task, text = execution.task, execution.samples[-1].outputs.get("text")
    answer = None if text is None else extract(text, extraction, tag)
    dataset = _scorer(task.metadata["environment"], orjson.dumps(task.metadata["args"], option=orjson.OPT_SORT_KEYS))
    try:
        return float(dataset.score_answer(answer, entry=_restored(task.metadata["entry"])))
    except Exception as error:  # noqa: BLE001 - scorers parse what a policy wrote, and some trip over what they did not expect
        _log.info(
            "the scorer of %s raised %r at an answer of task %s: it scores 0",
            task.metadata["environment"],
            error,
            task.id,
        )
        return 0.0


def held_out(question: str) -> bool:
    """Does the question belong to the held-out side?"""
    return xxhash.xxh3_64_intdigest(question.encode()) % HELD_OUT_ONE_IN == 0


def open_dataset(name: str, args: Mapping[str, Any]) -> Any:
    """The library's data set. Raises HookError: the extra is missing, the name unknown, or the arguments refused."""
    try:
        library = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise HookError(
            name, "no package reasoning_gym", f"the extra `{_EXTRA}`", f'pip install "physarum[{_EXTRA}]"'
        ) from None
    names = sorted(library.factory.DATASETS)
    if name not in names or name == "composite":
        near = difflib.get_close_matches(name, names, n=1)
        remedy = (
            "mix sources with `source.mixture`" if name == "composite" else f"did you mean `{near[0]}`?" if near else ""
        )
        raise HookError(name, "no such environment", "a data set of reasoning-gym", remedy or "see its gallery")
    try:
        return library.create_dataset(name, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise HookError(
            name, f"arguments that it refuses ({error})", "those of its configuration", "correct `args`"
        ) from error


def _checked(name: str, args: Mapping[str, Any]) -> _Generator:
    if "seed" in args:
        raise HookError(name, "`seed` among the arguments", "none: rows follow `run.seed`", "remove it from `args`")
    if name in _HASHED and not os.environ.get("PYTHONHASHSEED", "").isdigit():
        raise HookError(
            name,
            "a generator that makes other problems in each process",
            "a fixed order of Python's sets, so that a position defines its row",
            "export PYTHONHASHSEED=0 before the start",
        )
    return _Generator(name, args)


def _held_out_entries(generator: _Generator, seed: int, draws: int) -> Iterator[dict[str, Any]]:
    first = _hashed("held-out", seed)
    for draw in range(draws):
        chunk, index = divmod(draw, generator.size)
        start = _TRAINING_SEEDS + (first + chunk * generator.size) % (_TRAINING_SEEDS - generator.size)
        entry = generator.entry(start, index)
        if held_out(entry["question"]):
            yield entry


@functools.lru_cache(maxsize=32)
def _scorer(name: str, args: bytes) -> Any:
    return open_dataset(name, orjson.loads(args))


def _hashed(*key: object) -> int:
    return xxhash.xxh3_64_intdigest("/".join(map(str, key)).encode()) % _TRAINING_SEEDS


def _marked(value: Any) -> Any:
    """`value` as it can travel; scorers compare tuples, which would arrive as lists."""
    if isinstance(value, tuple):
        return {_TUPLE: [_marked(item) for item in value]}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(_restored(item) for item in value[_TUPLE])
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value
