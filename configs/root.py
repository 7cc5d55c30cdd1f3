"""The whole configuration of a run."""

from __future__ import annotations

from collections.abc import Iterator

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
from physarum.configs.origin import KeyPath, Origins
from physarum.configs.policies import PolicyConfig
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
    policies: dict[Name, PolicyConfig] = Field(default_factory=dict)
    """Trained beside `model`, each by a trainer of its own."""
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
    _policy: str = PrivateAttr(default="")
    _whole: RootConfig | None = PrivateAttr(default=None)

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

    @property
    def policy(self) -> str:
        """Whose view this is: the name of a further policy, "" for the run's own."""
        return self._policy

    @property
    def under(self) -> KeyPath:
        """Where this policy's own sections are written."""
        return ("policies", self._policy) if self._policy else ()

    def of_policy(self, name: str) -> RootConfig:
        """The run as the policy `name` sees it: model, trainer and the rules of training are its own, the rest is the run's.

        "" is the run's own policy, also seen from another one. Only that one asks for refills, so others have none.
        """
        whole = self if self._whole is None else self._whole
        if not name:
            return whole
        own = whole.policies[name]
        changed = {"model": own.model, "trainer": own.trainer, "age": own.age, "filters": own.filters}
        view = whole.model_copy(update={**changed, "groups": own.groups.model_copy(update={"refills": 0})})
        if own.sampling is not None:
            view = view.model_copy(update={"rollout": whole.rollout.model_copy(update={"sampling": own.sampling})})
        view._policy, view._whole = name, whole
        return view

    def views(self) -> Iterator[RootConfig]:
        """As each policy sees the run, its own first."""
        return (self.of_policy(name) for name in ("", *self.policies))

    def policy_of(self, group: str) -> str:
        """Whose versions the engines of `group` follow, as `policy` has it. Of no meaning where they have a `model`."""
        named, first = self.engines[group].policy, self.of_policy("").model.name
        return "" if named is None or named == first else named

    @property
    def following(self) -> dict[str, EngineConfig]:
        """The groups of engines that follow this policy's versions."""
        return {
            name: one for name, one in self.engines.items() if one.model is None and self.policy_of(name) == self.policy
        }
