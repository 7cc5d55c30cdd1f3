"""A rank's share of the training state as a tree, and back.

Invariant: after `restore` the next step is bit-equal to the step that would have followed `collect`.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from physarum.actors.trainer.errors import StateMismatch, StateNotWritten
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.model import Model, weights
from physarum.actors.trainer.megatron.optimizer import Optimizer
from physarum.actors.trainer.state import Tree, read_state, write_state

FORMAT = 2
"""Grows when the layout of the tree changes."""


def save_rank(folder: Path, model: Model, optimizer: Optimizer, parallel: Parallel, prefix: str = "") -> None:
    """Write this rank's share into `folder` (created if missing); replicas of a share are written once.

    `prefix` of the files' names tells several models apart; a checkpoint has no folders below its own.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateNotWritten(f"cannot make folder {folder} ({error}); expected a writable place for it") from error
    identity = _identity(model, optimizer, parallel)
    write_state({"identity": identity, "rng": _rng_states()}, folder, f"{prefix}rng-{parallel.rank:04d}")
    share = parallel.rank if identity["sharded"] else parallel.first_replica
    if share == parallel.rank:
        tree = {"identity": identity, "model": _model_tensors(model), "optimizer": _optimizer_tree(model, optimizer)}
        write_state(tree, folder, prefix + _share_name(share))


def load_rank(folder: Path, model: Model, optimizer: Optimizer, parallel: Parallel, prefix: str = "") -> None:
    """Inverse of `save_rank`. Raises StateMismatch before anything is changed."""
    identity = _identity(model, optimizer, parallel)
    share = read_state(folder, prefix + _share_name(parallel.rank if identity["sharded"] else parallel.first_replica))
    rng = read_state(folder, f"{prefix}rng-{parallel.rank:04d}")
    for tree in (share, rng):
        if tree["identity"] != identity:
            raise StateMismatch(
                f"training state in {folder} is of {tree['identity']}, this world is {identity}; "
                "expected the same: start the world with those settings or export and reload the weights only"
            )
    _check_shapes(folder, share["model"], _model_tensors(model))
    with torch.no_grad():
        for name, tensor in _model_tensors(model).items():
            tensor.copy_(share["model"][name])
    _restore_optimizer(model, optimizer, share["optimizer"])
    _restore_rng(rng["rng"])


def save_weights(folder: Path, name: str, weights: dict[str, Tensor], parallel: Parallel) -> None:
    """Writes this rank's share of a model that has no optimizer."""
    if parallel.rank == parallel.first_replica:
        write_state(
            {"weights": {key: one.detach() for key, one in weights.items()}}, folder, _weights_name(name, parallel)
        )


def load_weights(folder: Path, name: str, parallel: Parallel) -> dict[str, Tensor]:
    """Inverse of `save_weights`. Raises StateMismatch where there is none."""
    found: dict[str, Tensor] = read_state(folder, _weights_name(name, parallel))["weights"]
    return found


def _weights_name(name: str, parallel: Parallel) -> str:
    return f"{name}-{parallel.first_replica:04d}"


def _identity(model: Model, optimizer: Optimizer, parallel: Parallel) -> dict[str, Any]:
    sharded = bool(model.ddp.ddp_config.use_distributed_optimizer)
    return {
        "format": FORMAT,
        "ranks": parallel.ranks,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.cp,
        "ep": parallel.ep,
        "etp": parallel.etp,
        "sharded": sharded,
        "dtype": str(model.bridge.dtype),
        "optimizers": len(optimizer.inner()),
    }


def _share_name(rank: int) -> str:
    """Of the share that `rank` writes."""
    return f"share-{rank:04d}"


def _model_tensors(model: Model) -> dict[str, Tensor]:
    """The live tensors, without their graphs."""
    return {name: one.detach() for name, one in weights(model.module).items()}


def _main_parameters(model: Model, optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's own float32 masters, where they are not the model's parameters themselves."""
    own = {id(parameter) for parameter in model.module.parameters()}
    groups = (group for inner in optimizer.inner() for group in inner.param_groups)
    return [parameter for group in groups for parameter in group["params"] if id(parameter) not in own]


def _optimizer_tree(model: Model, optimizer: Optimizer) -> Tree:
    return {
        "steps": optimizer.steps,
        "inner": [inner.state_dict() for inner in optimizer.inner()],
        "main": [parameter.detach() for parameter in _main_parameters(model, optimizer)],
    }


def _restore_optimizer(model: Model, optimizer: Optimizer, tree: Tree) -> None:
    optimizer.steps = tree["steps"]
    for inner, state in zip(optimizer.inner(), tree["inner"], strict=True):
        inner.load_state_dict(state)
    with torch.no_grad():
        for parameter, saved in zip(_main_parameters(model, optimizer), tree["main"], strict=True):
            parameter.copy_(saved)


def _rng_states() -> Tree:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }


def _restore_rng(states: Tree) -> None:
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def _check_shapes(folder: Path, saved: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
    differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if differing:
        name = differing[0]
        raise StateMismatch(
            f"training state in {folder}: {len(differing)} tensors differ, first {name}: found {found.get(name)}, "
            f"expected {expected.get(name)}; it belongs to another model"
        )
