"""What of one rank is training state: the models that learn, with their optimizers, and those that move with them.

Invariant: names are those of a checkpoint's files and never change: "" is the policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from physarum.actors.trainer.frozen import FrozenModel
from physarum.actors.trainer.megatron.model import Model
from physarum.actors.trainer.megatron.optimizer import Optimizer

POLICY, CRITIC, REFERENCE = "", "critic", "reference"


@dataclass(frozen=True)
class Learner:
    """A model and what trains it."""

    model: Model
    optimizer: Optimizer


@dataclass(frozen=True)
class Holdings:
    """By name. A reference that never moves is read from its folder again and is not among `followers`."""

    learners: Mapping[str, Learner]
    followers: Mapping[str, FrozenModel]
