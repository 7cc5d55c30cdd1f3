"""`policies.<name>:` further policies that the run trains beside its own (`model:`, `trainer:`); docs/policies.md.

What is not written is as the run has it (policy_layer.py), so that a policy as it is resolved is complete by itself.
"""

from __future__ import annotations

from physarum.configs.age import AgeConfig
from physarum.configs.filters import FiltersConfig
from physarum.configs.groups import GroupsConfig
from physarum.configs.model import ModelConfig
from physarum.configs.sampling import SamplingConfig
from physarum.configs.trainer import TrainerConfig
from physarum.configs.types import Section


class PolicyConfig(Section):
    """Start model, Megatron world, and the rules of its training. Its name is its model's in version labels."""

    model: ModelConfig
    trainer: TrainerConfig
    age: AgeConfig = AgeConfig()
    groups: GroupsConfig = GroupsConfig()
    """Without `refills`: members are asked for again by the run's own policy alone."""
    filters: FiltersConfig = FiltersConfig()
    sampling: SamplingConfig | None = None
    """Its own; null: its turns are drawn as the run's are, with what rows, curricula and `actorctl sampling` change of that."""
