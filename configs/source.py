"""`source:` where the tasks come from."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from functools import reduce
from math import gcd
from typing import Annotated, Any, ClassVar, Final

from pydantic import AfterValidator, Field

from physarum.configs.hooks import Hook
from physarum.configs.rows import RowsConfig
from physarum.configs.types import Arguments, Count, Name, Section, refuse

_FINEST: Final = 100_000
"""The longest period of a mixture: the sum of its weights as whole numbers without a common divisor."""


class CurriculumConfig(Section):
    """A hook `(seed, **args)` that returns a `physarum.agents.protocols.Curriculum`."""

    hook: Hook
    args: Arguments = Field(default_factory=dict)


class MixturePart(RowsConfig):
    """One of several origins; `columns` and `chat` are the source's where they are null."""

    name: Name
    """Goes into the metadata of its rows, as `mixture`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of the rows is weight / sum of weights, exact to within one row wherever the mixture is cut off."""
    shuffle: bool | None = None
    """Null: as `source.shuffle`."""


def whole_weights(parts: tuple[MixturePart, ...]) -> list[int]:
    """The weights as whole numbers without a common divisor; decimals are taken as they are written."""
    exact = [Decimal(repr(part.weight)) for part in parts]
    places = max(0, *(-int(weight.as_tuple().exponent) for weight in exact), 0)
    whole = [int(weight.scaleb(places)) for weight in exact]
    divisor = reduce(gcd, whole)
    return [weight // divisor for weight in whole]


def _check_mixture(parts: tuple[MixturePart, ...]) -> tuple[MixturePart, ...]:
    if not parts:
        raise refuse("at least one part", "write a list of parts, each with a name and an origin")
    twice = [name for name, count in Counter(part.name for part in parts).items() if count > 1]
    if twice:
        raise refuse("a name of its own for each part", "rename one of them", found=f"{twice[0]!r} twice")
    if (period := sum(whole_weights(parts))) > _FINEST:
        weights = ", ".join(f"{part.weight:g}" for part in parts)
        expected = f"weights that are small whole numbers up to a factor, {_FINEST} in sum"
        raise refuse(expected, "round them", found=f"{weights}, which repeat after {period} rows")
    return parts


Mixture = Annotated[tuple[MixturePart, ...], Field(strict=False), AfterValidator(_check_mixture)]


class SourceConfig(RowsConfig):
    """Rows, and how they become tasks."""

    alternatives: ClassVar[tuple[str, ...]] = (*RowsConfig.alternatives, "mixture")

    name: Name = "main"
    mixture: Mixture | None = None
    """Several origins by weight. It has no end: each part begins anew, in another order, when it is through."""
    group_size: Count = 8
    """Executions of one prompt; their rewards are compared with each other."""
    purpose: Name = "train"
    shuffle: bool = True
    epochs: Count | None = None
    """Passes over the data; null is endless."""
    curriculum: CurriculumConfig | None = None
    """Which rows come next, learnt from how others came out; null issues them as they are."""

    def parts(self) -> list[tuple[tuple[Any, ...], RowsConfig]]:
        """Each section that names an origin, with its key below `source`."""
        if self.mixture is None:
            return [((), self)]
        return [(("mixture", index), part) for index, part in enumerate(self.mixture)]
