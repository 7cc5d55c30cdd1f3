"""The whole configuration of a run."""

from __future__ import annotations

from pydantic import Field, PrivateAttr

from physarum.configs.age import AgeConfig
from physarum.configs.autoscale import AutoscaleConfig
from physarum.configs.blobs import BlobsConfig
from physarum.configs.bus import BusConfig
from physarum.configs.checkpoint import CheckpointConfig
from physarum.configs.engine import EngineConfig
from physarum.configs.environments import EnvironmentClass
from physarum.configs.evaluation import EvaluationConfig
from physarum.configs.filters import FiltersConfig
from physarum.configs.groups import GroupsConfig
from physarum.configs.machines import MachineConfig
from physarum.configs.model import ModelConfig
from physarum.configs.origin import Origins
from physarum.configs.reward import RewardConfig
from physarum.configs.rollout import RolloutConfig
from physarum.configs.run import RunConfig
from physarum.configs.samples import SamplesConfig
from physarum.configs.source import SourceConfig
from physarum.configs.stop import StopConfig
from physarum.configs.supervisor import SupervisorConfig
from physarum.configs.trainer import TrainerConfig
from physarum.configs.types import Arguments, Name, Section


class RootConfig(Section):
    """One run, every default filled in and every path absolute. Made by `loader.resolve`."""

    run: RunConfig
    machines: dict[Name, MachineConfig] = Field(default_factory=dict)
    """Empty: one machine runs everything."""
    bus: BusConfig = BusConfig()
    model: ModelConfig
    source: SourceConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    engines: dict[Name, EngineConfig] = Field(default_factory=dict)
    trainer: TrainerConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    blobs: BlobsConfig = BlobsConfig()
    evaluation: EvaluationConfig | None = None
    age: AgeConfig = AgeConfig()
    groups: GroupsConfig = GroupsConfig()
    filters: FiltersConfig = FiltersConfig()
    samples: SamplesConfig = SamplesConfig()
    environments: dict[Name, EnvironmentClass] = Field(default_factory=dict)
    autoscale: AutoscaleConfig | None = None
    """Null: groups are as large as configured, or as `actorctl scale` says."""
    stop: StopConfig
    supervisor: SupervisorConfig = SupervisorConfig()
    extra: Arguments = Field(default_factory=dict)
    """The user's own keys for hooks; `extra.typed_extra` reads them with the hook's schema."""

    _origins: Origins = PrivateAttr(default_factory=Origins)

    @property
    def epochs(self) -> int | None:
        """Passes over the data that the source issues: the smaller of `source.epochs` and `stop.epochs`; None is endless."""
        given = [epochs for epochs in (self.source.epochs, self.stop.epochs) if epochs is not None]
        return min(given, default=None)

    @property
    def trained_temperature(self) -> float | None:
        """At which the trainer computes log-probabilities of what was drawn; None: of no drawing (demonstrations)."""
        return None if self.trainer.objective == "sft" else self.rollout.sampling.temperature

    @property
    def origins(self) -> Origins:
        """Where each value was written, for messages."""
        return self._origins

    def with_origins(self, origins: Origins) -> RootConfig:
        """The same configuration that remembers where its values were written."""
        copy = self.model_copy()
        copy._origins = origins
        return copy
