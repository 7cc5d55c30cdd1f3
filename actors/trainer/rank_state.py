"""A rank's share of the training state as files of its own, and back: the fastest form, for a world of the same shape.

Invariant: after `load` the next step is bit-equal to the step that would have followed `taken`.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from physarum.actors.trainer.errors import StateMismatch, StateNotWritten
from physarum.actors.trainer.holdings import Holdings
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.model import Model, weights
from physarum.actors.trainer.megatron.optimizer import Optimizer
from physarum.actors.trainer.rng_state import copied_rng, read_rng, restore_rng
from physarum.actors.trainer.state import Copied, Tree, copied, read_state, write

FORMAT = 2
"""Grows when the layout of the tree changes."""


def taken(held: Holdings, parallel: Parallel) -> list[Copied]:
    """This rank's share of everything, as it is now, on the host; replicas of a share are written once."""
    found: list[Copied] = []
    for name, one in held.learners.items():
        found += _copied_learner(one.model, one.optimizer, parallel, f"{name}-" if name else "")
    if parallel.rank == parallel.first_replica:
        for name, follower in held.followers.items():
            weights = {key: weight.detach() for key, weight in follower.weights().items()}
            found.append(copied({"weights": weights}, _weights_name(name, parallel)))
    return found


def save(folder: Path, share: list[Copied]) -> None:
    """Into `folder`, which is created if missing. Raises StateNotWritten."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateNotWritten(f"cannot make folder {folder} ({error}); expected a writable place for it") from error
    for one in share:
        write(one, folder)


def load(folder: Path, held: Holdings, parallel: Parallel) -> None:
    """Inverse of `save`. Raises StateMismatch before the model that does not fit is changed."""
    for name, one in held.learners.items():
        _load_learner(folder, one.model, one.optimizer, parallel, f"{name}-" if name else "")
    for name, follower in held.followers.items():
        follower.load(_load_weights(folder, name, parallel))


def _copied_learner(model: Model, optimizer: Optimizer, parallel: Parallel, prefix: str) -> list[Copied]:
    """`prefix` of the files' names tells several models apart; a checkpoint has no folders below its own."""
    identity = _identity(model, optimizer, parallel)
    found = [copied_rng(parallel.rank, identity, prefix)]
    share = parallel.rank if identity["sharded"] else parallel.first_replica
    if share == parallel.rank:
        tree = {"identity": identity, "model": _model_tensors(model), "optimizer": _optimizer_tree(model, optimizer)}
        found.append(copied(tree, prefix + _share_name(share)))
    return found


def _load_learner(folder: Path, model: Model, optimizer: Optimizer, parallel: Parallel, prefix: str) -> None:
    """Inverse of `_copied_learner`. Raises StateMismatch before anything is changed."""
    identity = _identity(model, optimizer, parallel)
    share = read_state(folder, prefix + _share_name(parallel.rank if identity["sharded"] else parallel.first_replica))
    rng_identity, rng = read_rng(folder, parallel.rank, prefix)
    for found in (share["identity"], rng_identity):
        if found != identity:
            raise StateMismatch(
                f"training state in {folder} is of {found}, this world is {identity}; expected the same: start the world with "
                "those settings, or save once in that shape with trainer.checkpoint_format torch_dist, which any shape reads"
            )
    _check_shapes(folder, share["model"], _model_tensors(model))
    with torch.no_grad():
        for name, tensor in _model_tensors(model).items():
            tensor.copy_(share["model"][name])
    _restore_optimizer(model, optimizer, share["optimizer"])
    restore_rng(rng)


def _load_weights(folder: Path, name: str, parallel: Parallel) -> dict[str, Tensor]:
    """Of a model that has no optimizer. Raises StateMismatch where there is none."""
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
