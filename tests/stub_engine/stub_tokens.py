"""What the stub says: every token is a pure function of (task, position, digest of the weights that made it).

So a token of the wrong weights is seen from the token itself, and a run whose weights, tasks and versions are those of
another run has its tokens too. Positions count from the start of the sequence, prompt included.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import xxhash
from safetensors import safe_open

_FIRST, _TOKENS = 14, 95
"""Ids of the printable characters in the calculator's vocabulary: what the stub says can be decoded."""
_WORST_NATS: Final = 4.0


def token(task: str, position: int, weights: str) -> int:
    """The token at `position` of the sequence of `task` under `weights`."""
    return _FIRST + _hashed("token", task, position, weights) % _TOKENS


def logprob(task: str, position: int, weights: str) -> float:
    """Its log-probability in nats, in (-4, 0): exact in float32, so that it travels unchanged."""
    return -_WORST_NATS * (1 + _hashed("logprob", task, position, weights) % 1023) / 1024


def length(task: str, start: int, mean: float) -> int:
    """Tokens that a request wants: exponential, whatever the weights are."""
    uniform = _hashed("length", task, start) / 2.0**64
    return max(1, round(-mean * math.log1p(-uniform)))


def tensor_digests(folder: Path) -> dict[str, str]:
    """Name of each tensor in the folder's safetensors to the digest of its bytes."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                found[name] = xxhash.xxh3_128_hexdigest(tensors.get_tensor(name).tobytes())
    return found


def weights_digest(tensors: dict[str, str]) -> str:
    """One digest of all tensors, in the order of their names."""
    listing = "\n".join(f"{name} {digest}" for name, digest in sorted(tensors.items()))
    return xxhash.xxh3_128_hexdigest(listing.encode())


def _hashed(*key: object) -> int:
    return xxhash.xxh3_64_intdigest("/".join(map(str, key)).encode())
