"""Training state in torch_dist: one folder that a world of another shape reads too.

    __R_0.distcp, .metadata, metadata.json   Megatron-core's format: weights and moments, `critic.` and `reference.` before
                                             the names of those models
    training.msgpack, .safetensors           type of the weights and step counts
    rng-RRRR.msgpack, .safetensors           each rank's generators, taken up where the shape is the same

Invariant: a world of the same shape goes on bit for bit; one of another shape has the same weights, moments and counts,
and generators that begin at the seed.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from physarum.actors.trainer.errors import StateMismatch
from physarum.actors.trainer.holdings import POLICY, Holdings
from physarum.actors.trainer.megatron import sharded_state, torch_dist
from physarum.actors.trainer.megatron.common_state import optimizer_steps
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.model import Model
from physarum.actors.trainer.rng_state import copied_rng, read_rng, restore_rng
from physarum.actors.trainer.state import Copied, copied, read_state, write

logger = logging.getLogger(__name__)

FORMAT = 1
"""Grows when names or the common record change."""
_COMMON = "training"


class Share(NamedTuple):
    """This rank's share of everything, on the host."""

    tensors: torch_dist.Taken
    small: list[Copied]


def taken(held: Holdings, parallel: Parallel) -> Share:
    """As it is now; collective where an optimizer is sharded."""
    identity = _identity(held, parallel)
    tensors = torch_dist.taken(_tree(held, loading=False), {"checkpoint_version": 3.0, "physarum_format": FORMAT})
    small = [copied_rng(parallel.rank, identity)]
    if parallel.rank == 0:
        small.append(copied({"format": FORMAT, "dtype": identity["dtype"], "steps": _steps(held)}, _COMMON))
    return Share(tensors, small)


def save(folder: Path, share: Share, group: dist.ProcessGroup) -> None:
    """Collective over `group`, which nothing else may use meanwhile: all ranks, on their hosts.

    Raises StateNotWritten; what only one rank could not write, only that rank raises.
    """
    torch_dist.write(folder, share.tensors, group)
    for one in share.small:
        write(one, folder)


def load(folder: Path, held: Holdings, parallel: Parallel) -> None:
    """Inverse of `taken` and `save`, in any shape. Raises StateMismatch before anything is changed."""
    identity, common = _identity(held, parallel), read_state(folder, _COMMON)
    found = (common["format"], common["dtype"], sorted(common["steps"]))
    expected = (FORMAT, identity["dtype"], sorted(held.learners))
    if found != expected:
        raise StateMismatch(
            f"training state in {folder} is of (format, dtype, learners) {found}, this world is of {expected}; "
            "expected the same: start the world with those settings or export and reload the weights only"
        )
    tree = _tree(held, loading=True)
    read = torch_dist.read(folder, tree)
    for name, one in held.learners.items():
        named = sharded_state.weights(one.model.module)
        sharded_state.restore_weights(named, read[_branch(name)]["weights"])
        sharded_state.restore_moments(one.optimizer, named, read[_branch(name)]["moments"], common["steps"][name])
    for name, follower in held.followers.items():
        sharded_state.restore_weights(sharded_state.weights(follower.module), read[name]["weights"])
    _take_up_rng(folder, identity, parallel)


def load_optimizer(folder: Path, held: Holdings, steps: int | None) -> int:
    """The policy's optimizer alone, from a folder that Megatron-core or this wrote; the steps that it had made: `steps`, or as
    the folder tells.

    Raises StateMismatch before anything is changed: other weights than the model's, no state in whole tensors, no step count.
    """
    counted = _counted(folder, steps)
    learner, keys = held.learners[POLICY], torch_dist.Reader(folder).shapes().keys()
    if sharded := [key for key in keys if key.startswith("optimizer.distributed.")]:
        raise StateMismatch(
            f"the optimizer in {folder} is stored as buffers of its own world ({sharded[0]}); expected whole tensors: save once"
            " with --dist-ckpt-optim-fully-reshardable, or begin with a fresh optimizer"
        )

    def named() -> sharded_state.Named:
        found = sharded_state.weights(learner.model.module, sharded_state.layout_of(keys))
        return sharded_state.renamed(found, keys)

    _same_weights(folder, named)
    moments = sharded_state.with_masters_in(keys, sharded_state.moments(learner.optimizer, named(), loading=True))
    sharded_state.restore_moments(learner.optimizer, named(), torch_dist.read(folder, moments), counted)
    return counted


def save_weights(folder: Path, model: Model) -> None:
    """Only a model's weights, as any user of Megatron-core reads them; collective. Raises StateNotWritten."""
    torch_dist.write(folder, torch_dist.taken(sharded_state.weights(model.module), {"checkpoint_version": 3.0}))


def load_weights(folder: Path, model: Model) -> set[str]:
    """Only a model's weights, whoever wrote the folder; the names of the tensors that were read.

    Raises StateMismatch before anything is changed.
    """
    keys = torch_dist.Reader(folder).shapes().keys()
    named = sharded_state.renamed(sharded_state.weights(model.module, sharded_state.layout_of(keys)), keys)
    taken = torch_dist.names(named)
    sharded_state.restore_weights(sharded_state.weights(model.module), torch_dist.read(folder, named))
    return taken


def _counted(folder: Path, steps: int | None) -> int:
    if steps is None and (folder / f"{_COMMON}.msgpack").is_file():
        steps = read_state(folder, _COMMON)["steps"][POLICY]
    steps = optimizer_steps(folder) if steps is None else steps
    if steps is None:
        raise StateMismatch(
            f"{folder} does not tell how many steps its optimizer has made; expected `step` in common.pt: say it with"
            " trainer.optimizer_start.steps"
        )
    return steps


def _same_weights(folder: Path, named: Callable[[], sharded_state.Named]) -> None:
    """Moments of other weights would be taken for these ones'."""
    aside = {name: replace(leaf, data=leaf.data.detach().clone()) for name, leaf in named().items()}
    read = torch_dist.read(folder, aside)
    other = [name for name, leaf in named().items() if not torch.equal(leaf.data, read[name].to(leaf.data.dtype))]
    if other:
        raise StateMismatch(
            f"{len(other)} of {len(read)} weights in {folder} are not the model's, first {other[0]}; expected the same:"
            " make the model from this folder (`actorctl checkpoints import-megatron`)"
        )


def _tree(held: Holdings, loading: bool) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, one in held.learners.items():
        named = sharded_state.weights(one.model.module)
        tree[_branch(name)] = {"weights": named, "moments": sharded_state.moments(one.optimizer, named, loading)}
    for name, follower in held.followers.items():
        tree[name] = {"weights": sharded_state.weights(follower.module)}
    for name in tree.keys() - {_branch("")}:
        add_prefix_for_sharding(tree[name], f"{name}.")
    return tree


def _branch(name: str) -> str:
    return name or "policy"


def _steps(held: Holdings) -> dict[str, int]:
    return {name: one.optimizer.steps for name, one in held.learners.items()}


def _identity(held: Holdings, parallel: Parallel) -> dict[str, Any]:
    """What the generators depend on, and the type of the weights."""
    shape = {name: getattr(parallel, name) for name in ("ranks", "tp", "pp", "cp", "ep", "etp")}
    return shape | {"dtype": str(held.learners[""].model.bridge.dtype)}


def _take_up_rng(folder: Path, identity: dict[str, Any], parallel: Parallel) -> None:
    if (folder / f"rng-{parallel.rank:04d}.msgpack").is_file():
        found, states = read_rng(folder, parallel.rank)
        if found == identity:
            restore_rng(states)
            return
    logger.info("%s was saved in another shape: rank %d's generators begin at the seed", folder, parallel.rank)
