"""A rank's random generators on disk: torch's for the host, for the device, and Megatron's tracker."""

from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from physarum.actors.trainer.state import Copied, Tree, copied, read_state


def copied_rng(rank: int, identity: dict[str, Any], prefix: str = "") -> Copied:
    """As they are now. `identity`: of the world whose generators they are."""
    return copied({"identity": identity, "rng": _states()}, _name(rank, prefix))


def read_rng(folder: Path, rank: int, prefix: str = "") -> tuple[dict[str, Any], Tree]:
    """The identity and what `restore_rng` takes. Raises StateMismatch where there is none."""
    found = read_state(folder, _name(rank, prefix))
    return found["identity"], found["rng"]


def restore_rng(states: Tree) -> None:
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def _name(rank: int, prefix: str) -> str:
    return f"{prefix}rng-{rank:04d}"


def _states() -> Tree:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }
