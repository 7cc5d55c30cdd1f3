"""Reading a quantization_config: what is not understood is refused, never passed over.

Invariant: every message names the option, what it is and what is supported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from physarum.weightsync.errors import QuantisationError

SUPPORTED: Final = (
    "fp8 (weight_block_size, or one scale for each tensor; activations dynamic), mxfp8, and compressed-tensors with"
    " float-quantized 8 bits (tensor, channel, block) or pack-quantized 4-bit integers (group, channel; symmetric)"
)

Options = Mapping[str, Any]


def refused(found: str, remedy: str = "") -> QuantisationError:
    """The error for a configuration that has `found`."""
    ending = f": {remedy}" if remedy else ""
    return QuantisationError(f"quantization_config has {found}; supported are {SUPPORTED}{ending}")


def require(options: Options, name: str, allowed: Collection[object], where: str = "", remedy: str = "") -> Any:
    """`options[name]` (None: it is not there), one of `allowed`. Raises QuantisationError."""
    value = options.get(name)
    if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
        raise refused(f"{where}{name}: {value!r}", remedy)
    return value


def refuse_unknown(options: Options, known: Collection[str], where: str = "") -> None:
    """Raises QuantisationError for an option that is set and not `known`."""
    for name, value in options.items():
        if name not in known and value is not None and value not in ({}, [], ""):
            raise refused(
                f"{where}{name}: {value!r}", "this option is not known here, and may change the stored tensors"
            )


def texts(options: Options, name: str) -> tuple[str, ...]:
    """A list of names; empty where it is absent. Raises QuantisationError."""
    found = options.get(name) or []
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) and one for one in found):
        raise refused(f"{name}: {found!r}", "it must be a list of names")
    return tuple(found)


def block(options: Options, name: str, where: str = "") -> tuple[int, int] | None:
    """Two positive integers, rows and columns; None where it is absent. Raises QuantisationError."""
    found = options.get(name)
    if found is None:
        return None
    if not isinstance(found, list | tuple) or len(found) != 2 or not all(type(one) is int and one > 0 for one in found):
        raise refused(f"{where}{name}: {found!r}", "it must be two positive integers, for example [128, 128]")
    return found[0], found[1]
