"""What the configured algorithm needs to know of each token besides the sample itself: passes of other models over the batch.

Invariant: collective; nothing is computed that the configuration does not use, and every rank gets the same columns.

    proximal    the policy before the first update of the batch        kept   the version that made the token
    reference   the model that the KL penalty refers to                value  the critic
    teacher:*   frozen models to learn from

With `replay.routing: R2` the proximal pass also says which experts each token took, for the updates that follow.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from physarum.actors.trainer.advantage import TEACHER
from physarum.actors.trainer.algorithm_settings import AlgorithmSettings
from physarum.actors.trainer.batch import Experts, Float32, TrainSequence
from physarum.actors.trainer.critic import Critic
from physarum.actors.trainer.errors import UnsupportedModel
from physarum.actors.trainer.frozen import FrozenModel, KeptWeights
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.model import Model, weights
from physarum.actors.trainer.passes import Passes
from physarum.actors.trainer.world_config import WorldConfig

logger = logging.getLogger(__name__)

AGE = "age"
KEPT_VERSIONS = 8
"""Versions of the policy that `old_logprobs: kept` holds on the host; older tokens take the engine's log-probabilities."""


class Signals:
    """The models that are asked, of one rank."""

    def __init__(
        self, config: WorldConfig, parallel: Parallel, dtype: torch.dtype, passes: Passes, policy: Model
    ) -> None:
        self._config, self._settings = config, config.algorithm
        self._passes, self._policy = passes, policy
        build = partial(_frozen_model, config, parallel, dtype)
        self.reference = build(self._settings.reference.model or config.hf_folder) if _refers(config) else None
        self._teachers = {name: build(one.model) for name, one in self._settings.teachers.items()}
        for name, teacher in self._teachers.items():
            if teacher.vocab_size != policy.vocab_size:
                raise UnsupportedModel(
                    f"teacher {name} ({self._settings.teachers[name].model}) has {teacher.vocab_size} token ids, the policy"
                    f" {policy.vocab_size}; expected the same vocabulary: take a teacher of the policy's family"
                )
        if self.reference is not None and self._settings.reference.update_every is not None:
            _check_same_shape(self.reference, policy)
        keeps = self._settings.old_logprobs == "kept"
        self.kept = KeptWeights(KEPT_VERSIONS) if keeps else None
        self._scratch = build(config.hf_folder, replays=policy.routing is not None) if keeps else None

    def complete(self, sequences: Sequence[TrainSequence], critic: Critic | None) -> list[TrainSequence]:
        """The sequences with every column that the algorithm uses; without ages, all tokens are of the present weights."""
        columns: dict[str, list[Float32]] = {}
        routing: list[Experts] | None = None
        if any(AGE not in one.columns for one in sequences):
            sequences = [one.with_columns(**{AGE: np.zeros(one.response_len, np.float32)}) for one in sequences]
        if self._settings.replay.routing == "R2":
            columns["proximal"], routing = self._passes.logprobs_and_routing(
                self._policy, sequences, self._config.temperature
            )
        elif self._settings.needs_proximal:
            columns["proximal"] = self._asked(self._policy, sequences)
        if self.reference is not None:
            columns["reference"] = self._frozen(self.reference, sequences)
        for name, teacher in self._teachers.items():
            columns[TEACHER + name] = self._frozen(teacher, sequences)
        if self.kept is not None:
            columns["kept"] = self._by_makers(sequences)
        if critic is not None:
            columns["value"] = critic.values(self._passes, sequences)
        complete = [
            one.with_columns(**{name: values[index] for name, values in columns.items()})
            for index, one in enumerate(sequences)
        ]
        return complete if routing is None else _routed(complete, routing)

    def before_batch(self, number: int) -> None:
        """The weights as they are now are number `number`."""
        if self.kept is not None and self.kept.get(number) is None:
            self.kept.keep(number, self._policy.module)

    def after_batch(self, number: int) -> None:
        """The weights that the batch left are number `number`: kept, and the reference where it is due."""
        if self.kept is not None:
            self.kept.keep(number, self._policy.module)
        every = self._settings.reference.update_every
        if self.reference is not None and every is not None and number % every == 0:
            self.reference.load(weights(self._policy.module))

    def _frozen(self, model: FrozenModel, sequences: Sequence[TrainSequence]) -> list[Float32]:
        with model.on_device() as found:
            return self._asked(found, sequences)

    def _asked(self, model: Model, sequences: Sequence[TrainSequence]) -> list[Float32]:
        return self._passes.logprobs(model, sequences, self._config.temperature)

    def _by_makers(self, sequences: Sequence[TrainSequence]) -> list[Float32]:
        """Each token's log-probability under the weights that made it: one pass per age that occurs."""
        assert self.kept is not None and self._scratch is not None
        result = [one.engine_logprobs.copy() for one in sequences]
        number = self.kept.newest
        ages = sorted({int(age) for one in sequences for age in np.unique(one.columns[AGE][one.loss_mask])})
        for age in ages:
            weights = self.kept.get(number - age)
            if weights is None:
                logger.warning(
                    "weights %d are kept no longer: their tokens take the engine's log-probabilities", number - age
                )
                continue
            self._scratch.load(weights)
            for found, own, one in zip(self._frozen(self._scratch, sequences), result, sequences, strict=True):
                own[one.columns[AGE] == age] = found[one.columns[AGE] == age]
        return result


def _routed(sequences: list[TrainSequence], routing: list[Experts]) -> list[TrainSequence]:
    pairs = zip(sequences, routing, strict=True)
    return [msgspec.structs.replace(one, routed_experts=experts) for one, experts in pairs]


def _frozen_model(
    config: WorldConfig, parallel: Parallel, dtype: torch.dtype, folder: str, replays: bool = False
) -> FrozenModel:
    return FrozenModel(Path(folder), parallel, dtype, config.megatron, replays)


def _check_same_shape(reference: FrozenModel, policy: Model) -> None:
    """Raises UnsupportedModel for a reference that cannot become the policy."""
    own = {name: tuple(one.shape) for name, one in weights(policy.module).items()}
    other = {name: tuple(one.shape) for name, one in reference.weights().items()}
    differing = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
    if differing:
        name = differing[0]
        raise UnsupportedModel(
            f"reference.model has {name} of shape {other.get(name)}, the policy {own.get(name)}; expected the policy's own"
            " architecture, since reference.update_every makes it the policy: take such a model, or let it stay as it is"
        )


def _refers(config: WorldConfig) -> bool:
    return config.objective == "dpo" or config.algorithm.uses_reference


def needed_columns(objective: str, settings: AlgorithmSettings) -> list[str]:
    """The columns that a microbatch's loss reads besides `engine` and `advantage`."""
    if objective != "rl":
        return ["reference"] if objective == "dpo" else []
    names = [AGE]
    if settings.needs_proximal:
        names.append("proximal")
    if settings.uses_reference:
        names.append("reference")
    if settings.old_logprobs == "kept":
        names.append("kept")
    if settings.weighs_whole_batch:
        names.append("correction")
    return names
