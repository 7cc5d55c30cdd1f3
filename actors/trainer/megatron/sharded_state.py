"""A model and its optimizer as named tensors of the whole model, of which this rank holds parts.

Invariant: names and shapes do not depend on how the model is cut or on who holds the optimizer's state, so what one world
wrote another reads, whatever the shapes of the two. Names are Megatron-core's: those of the weights, and
`optimizer.state.<moment>.<weight>` for each moment and for float32 masters (`fp32_param`). Float32 weights are their own
masters and are stored once.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from physarum.actors.trainer.megatron.optimizer import Optimizer

Leaf: TypeAlias = ShardedTensor | ShardedTensorFactory
Named: TypeAlias = dict[str, Leaf]
"""This rank's part of every tensor, by this rank's name for it."""

LAYOUT = {"non_homogeneous_layers": True, "singleton_local_shards": False}
"""Megatron's words for how it names tensors: each layer's by itself, experts and halves of a gated layer together."""

_MASTER = "fp32_param"
_DISTRIBUTED_MASTER = "param"
"""What Megatron's distributed optimizer calls it."""
_STATE = "optimizer.state"
_NUMBERED_LAYER = re.compile(r"decoder\.layers\.\d+\.")
_NORMS = (
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
)
_VALUE_HEAD = "value_head"


def weights(module: torch.nn.Module, layout: Mapping[str, bool] = LAYOUT) -> Named:
    """The module's parameters and persistent buffers: the live tensors, named as `layout` says.

    A critic's value head stands where a language model has its output layer, which then is no state.
    """
    is_critic = _VALUE_HEAD in module._modules
    describe = MegatronModule.sharded_state_dict if is_critic else type(module).sharded_state_dict
    tensors, _ = extract_sharded_tensors_and_factories(describe(module, metadata=dict(layout)))
    return {name: leaf for name, leaf in tensors.items() if not (is_critic and name.startswith("output_layer."))}


def layout_of(keys: Iterable[str]) -> dict[str, bool]:
    """How the tensors of a folder are named, by which Megatron-core releases differ."""
    names = list(keys)
    return {
        "non_homogeneous_layers": any(_NUMBERED_LAYER.match(name) for name in names),
        "singleton_local_shards": any(name.endswith("linear_fc1.weight_w") for name in names),
    }


def renamed(named: Named, keys: Collection[str]) -> Named:
    """With the names that Transformer Engine's layers give to norms that stand alone, where only those are in `keys`."""

    def key(own: str) -> str:
        others = (own.replace(fused, alone) for fused, alone in _NORMS if fused in own)
        return own if own in keys else next((one for one in others if one in keys), own)

    return {name: replace(leaf, key=key(leaf.key)) for name, leaf in named.items()}


def moments(optimizer: Optimizer, named: Named, loading: bool = False) -> dict[str, Any]:
    """The optimizer's state; `named` are its model's weights. Collective where it is sharded, unless it is `loading`.

    A state that is not there before the first step is made, as the first step would make it.
    """
    whole: dict[str, dict[str, Leaf]] = {}
    sharded: dict[int, Any] = {}
    for place, one in enumerate(_parts(optimizer)):
        _begin(one)
        if isinstance(one, DistributedOptimizer):
            sharded[place] = _gathered(one, named, loading)
        else:
            whole |= _own(one, named)
    return {"whole": whole, "sharded": sharded}


def with_masters_in(keys: Collection[str], moments: dict[str, Any]) -> dict[str, Any]:
    """`moments` whose masters have the name that Megatron's distributed optimizer gives them, where only that is in `keys`."""

    def known(leaf: Leaf) -> Leaf:
        own, other = (f"{_STATE}.{name}." for name in (_MASTER, _DISTRIBUTED_MASTER))
        renamed_key = leaf.key.replace(own, other, 1) if leaf.key.startswith(own) else leaf.key.replace(other, own, 1)
        return leaf if leaf.key in keys or renamed_key not in keys else replace(leaf, key=renamed_key)

    def through(node: Any) -> Any:
        return {key: through(value) for key, value in node.items()} if isinstance(node, dict) else known(node)

    found: dict[str, Any] = through(moments)
    return found


def restore_moments(optimizer: Optimizer, named: Named, read: dict[str, Any], steps: int) -> None:
    """Takes what `read` holds in the places of `moments(..., loading=True)`; `steps`: how many the optimizer has made."""
    for place, one in enumerate(_parts(optimizer)):
        if isinstance(one, DistributedOptimizer):
            with _step_counts_aside(one):
                one.load_parameter_state_from_fully_reshardable(_with_masters(one, read["sharded"][place]))
        else:
            _copy(_own(one, named), read["whole"])
        _count(one, steps)
    optimizer.steps = steps


def restore_weights(named: Named, read: dict[str, Tensor]) -> None:
    """Most were read into their places; those that Megatron cuts otherwise for the file are copied there.

    `named` is made anew: reading changes the leaves that it is given.
    """
    with torch.no_grad():
        for name, leaf in named.items():
            leaf.data.copy_(read[name])


def _parts(optimizer: Optimizer) -> list[MegatronOptimizer]:
    return [one for one in optimizer.megatron.chained_optimizers if one.optimizer is not None]


def _begin(one: MegatronOptimizer) -> None:
    inner = one.optimizer
    if one.init_state_fn is not None:  # Adam
        one.init_state_fn(inner, one.config)
        for state in inner.state.values():
            state.setdefault("step", torch.tensor(0.0))
        return
    for group in inner.param_groups:  # stochastic gradient descent
        for parameter in group["params"] if group["momentum"] else ():
            inner.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _own(one: MegatronOptimizer, named: Named) -> dict[str, dict[str, Leaf]]:
    """Of an optimizer whose every rank has the state of all of its weights."""
    known = {id(parameter) for group in one.param_groups for parameter in group["params"]}
    found = {}
    for name, leaf in named.items():
        master = getattr(leaf.data, "main_param", leaf.data)
        if id(master) not in known:
            continue
        tensors = {moment: value for moment, value in one.optimizer.state[master].items() if moment != "step"}
        if master is not leaf.data:
            tensors[_MASTER] = master.detach()
        found[name] = {
            moment: make_sharded_optimizer_tensor(leaf, value, f"{_STATE}.{moment}")
            for moment, value in tensors.items()
        }
    return found


def _gathered(one: DistributedOptimizer, named: Named, loading: bool) -> dict[int, dict[str, Leaf]]:
    """Of an optimizer that is sharded over data-parallel ranks: put together on each of them, on the host."""
    found = one.sharded_param_state_fully_reshardable(named, loading, {})
    for weight, tensors in zip(_weights_in_order(one), found.values(), strict=True):
        master = tensors.pop(_DISTRIBUTED_MASTER)
        if weight.dtype != torch.float32:
            key = master.key.replace(f"{_STATE}.{_DISTRIBUTED_MASTER}.", f"{_STATE}.{_MASTER}.", 1)
            tensors[_MASTER] = replace(master, key=key)
    state: dict[int, dict[str, Leaf]] = found
    return state


def _with_masters(one: DistributedOptimizer, read: dict[int, dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Megatron's own form again."""
    for weight, tensors in zip(_weights_in_order(one), read.values(), strict=True):
        tensors[_DISTRIBUTED_MASTER] = tensors.pop(_MASTER, weight.detach())
    return read


def _weights_in_order(one: DistributedOptimizer) -> list[Tensor]:
    return [weight for buffer in one.buffers for weight in buffer.param_index_map]


@contextmanager
def _step_counts_aside(one: DistributedOptimizer) -> Iterator[None]:
    """torch's Adam has its step count among the moments, and Megatron would look for it in the file: KeyError 'step'."""
    counts = [(state, state.pop("step")) for state in one.optimizer.state.values() if "step" in state]
    yield
    for state, count in counts:
        state["step"] = count


def _count(one: MegatronOptimizer, steps: int) -> None:
    for state in one.optimizer.state.values():
        if "step" in state:
            state["step"] = torch.tensor(float(steps))
    for group in one.optimizer.param_groups:
        if "step" in group:  # fused Adam counts there
            group["step"] = steps


def _copy(own: dict[str, dict[str, Leaf]], read: dict[str, dict[str, Tensor]]) -> None:
    with torch.no_grad():
        for name, tensors in own.items():
            for moment, leaf in tensors.items():
                leaf.data.copy_(read[name][moment])
