"""`engines.<group>:` SGLang servers, started here or attached by URL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from physarum.configs.hooks import Hook
from physarum.configs.servers import Place, ServersConfig, check_roles, place_of
from physarum.configs.sglang_arguments import WAITS_FOR_WEIGHTS, OwnArguments, SglangArguments
from physarum.configs.types import (
    Arguments,
    Count,
    Devices,
    Environment,
    HttpUrl,
    HttpUrls,
    Name,
    Seconds,
    Section,
    refuse,
)


class CanaryConfig(Section):
    """Some engines of a group take each version first; the others once `gate` let it pass on each of those."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Of the group; at least one engine."""
    gate: Hook | None = None
    """`async (probe, **args)`: returns to let a version pass, raises to refuse it (actors/engine/gate.py). Null: the version's
    log-probabilities must be finite."""
    args: Arguments = Field(default_factory=dict)
    timeout_s: Seconds = 60.0
    """For the gate; later it has refused."""


class ConcurrencyConfig(Section):
    """How many requests an engine has at once: found from its KV usage and queue time (actors/engine/limit.py), announced, and
    shared by the rollout actors."""

    floor: Count = 4
    ceiling: Count | None = None
    """Null: as many as the server runs at once."""
    start: Count | None = None
    """Null: as many as fit whatever they do; a larger one is brought down to that."""
    kv_target: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Usage of the KV pool up to which more is let in; halfway from there to 1 the limit shrinks."""
    queue_target_s: Seconds = 2.0
    """A request may wait this long inside the engine."""
    decrease: Annotated[float, Field(gt=0, lt=1)] = 0.85
    step: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Growth of the limit in the time in which the KV is replaced once, after the first decrease."""
    period_s: Seconds = 1.0
    """Between two samples of the load, each of which is announced."""

    @model_validator(mode="after")
    def _ordered(self) -> ConcurrencyConfig:
        highest = min((bound for bound in (self.ceiling, self.start) if bound is not None), default=None)
        if highest is not None and highest < self.floor:
            raise refuse(
                expected="`floor` <= `start` and `floor` <= `ceiling`",
                remedy="lower `floor`, or raise the other",
                found=f"floor {self.floor}, start {self.start}, ceiling {self.ceiling}",
            )
        return self


class EngineConfig(Section):
    """A group of engines that serve the same weights. With `url` they are external: attached, never started or stopped."""

    count: Count = 1
    """Equal servers to start; with `url` the number of URLs counts instead."""
    nodes: Count = 1
    """Hosts over which each server spans."""
    servers: tuple[ServersConfig, ...] = ()
    """Different servers in the place of `count` equal ones (configs/servers.py)."""
    model: Path | None = None
    """A Hugging Face folder; null serves the policy and follows its versions."""
    policy: Name | None = None
    """Which policy's versions are followed, of `policies`; null: the run's own."""
    quantised_model: Path | None = None
    """The start model in a quantised form (a Hugging Face folder whose config.json has a quantization_config): the engines
    start from it, and versions are quantised in the same way. Null: they start from the start model as it is."""
    python: Path | None = None
    """Interpreter of the engine's environment; null takes .venv-engine beside the project, else this interpreter."""
    url: HttpUrls | None = None
    router: HttpUrl | None = None
    """An sglang-router in front of these engines: it then chooses among them, and where it fails they are asked directly."""
    start_router: OwnArguments | None = None
    """The same, started here: its arguments, `{}` for its defaults. Needs sglang-router in the engine's environment."""
    sglang: SglangArguments = Field(default_factory=dict)
    start_timeout_s: Seconds = 600.0
    """From start to health; a cold server takes minutes."""
    unresponsive_timeout_s: Seconds = 300.0
    """A server that does not report its load gets no traffic; after this long it is started anew (not one at a `url`)."""
    concurrency: ConcurrencyConfig | None = ConcurrencyConfig()
    """Null: no limit; what an engine cannot run waits inside it."""
    pause: Literal["retract", "in_place"] = "retract"
    """Weight updates: `retract` recomputes held tokens once, `in_place` goes on over the old KV."""
    update_timeout_s: Seconds = 60.0
    transport: Literal["auto", "nccl", "ipc", "disk", "checkpoint_engine"] = "auto"
    """How verified weights get into an engine: `ipc` through memory on its own device, `nccl` the same, but broadcast there by
    the trainer, `disk` as a folder that it reads, `checkpoint_engine` as `ipc`, by the engine's own receiver of that package;
    `auto` takes ipc for engines that are started here on CUDA."""
    weights_from: Literal["service", "mirror"] = "service"
    """`mirror`: versions come out of `checkpoint.versions.mirror` once they are there, for engines whose hosts reach that and
    not the checkpoint service. `service`: from there only where the service, or a chunk's holder, does not answer."""
    weights_folder: Path | None = None
    """Where the engines read versions from; for engines at a `url` on another host, a folder that both see under this path."""
    update_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """At most this share of the group, and at least one engine, stands still for an update at the same time (of pairs all)."""
    canary: CanaryConfig | None = None
    """Null: all engines take a version as soon as they have it."""
    gpus: Devices = 0
    env: Environment = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_description(self) -> EngineConfig:
        if not self.servers:
            return self
        beside = {
            "count": self.count != 1,
            "nodes": self.nodes != 1,
            "gpus": bool(self.gpus),
            "url": self.url is not None,
        }
        if given := [name for name, there in beside.items() if there]:
            raise refuse(
                expected="either `servers`, or `count`, `nodes`, `gpus` or `url`",
                remedy=f"write {given[0]} into the parts of `servers`",
                found=f"`servers` with {' and '.join(f'`{name}`' for name in given)}",
            )
        check_roles(self.servers)
        return self

    @property
    def parts(self) -> tuple[ServersConfig, ...]:
        """What the group consists of; one part where `servers` is not written."""
        return self.servers or (ServersConfig(count=self.instances, nodes=self.nodes, gpus=self.gpus),)

    @property
    def gpus_asked(self) -> bool:
        """Whether it holds devices."""
        return any(part.gpus for part in self.parts)

    @property
    def before_last_part(self) -> int:
        """Servers of all parts but the last that has any: that one is scaled."""
        return self.instances - [part.started for part in self.parts if part.started][-1] if self.servers else 0

    @property
    def fewest(self) -> int:
        """What it is never scaled below by itself: pairs, and servers with encoders, are nothing without the last part."""
        return self.before_last_part + (self.paired or self.encodes)

    @property
    def paired(self) -> bool:
        """Whether a request is served by a prefill and a decode server together."""
        return any(part.role == "decode" for part in self.servers)

    @property
    def encodes(self) -> bool:
        """Whether images are encoded by servers of their own."""
        return any(part.role == "encoder" for part in self.servers)

    def place(self, number: int) -> Place:
        """Of server `number` in `parts`."""
        return place_of(self.parts, number)

    def part_of(self, number: int) -> ServersConfig:
        """What server `number` is."""
        return self.parts[self.place(number).part]

    def nodes_of(self, number: int) -> int:
        """Processes of server `number`; one at a `url` has one, which is not ours."""
        return self.part_of(number).nodes if self.url is None else 1

    def of_server(self, number: int) -> EngineConfig:
        """The same group with the arguments and variables of one of its servers."""
        part = self.part_of(number)
        arguments = {name: item for name, item in {**self.sglang, **part.sglang}.items() if item is not None}
        return self.model_copy(update={"sglang": arguments, "env": {**self.env, **part.env}})

    def values_of(self, argument: str) -> list[JsonValue]:
        """What is written for an SGLang argument, in any part."""
        written = [{**self.sglang, **part.sglang}.get(argument) for part in self.parts]
        return [value for value in written if value is not None]

    @property
    def waits_for_weights(self) -> bool:
        """Whether the servers are started to serve nothing before weights came by checkpoint_engine."""
        return bool(self.sglang.get(WAITS_FOR_WEIGHTS))

    @property
    def starts_empty(self) -> bool:
        """Whether a server may make no token before its first version: servers at a `url` do not tell."""
        return self.waits_for_weights or self.transport == "checkpoint_engine"

    @property
    def updated_at_once(self) -> int:
        """Engines that may stand still for an update at the same time; 0: all of them, so nobody waits. Halves of pairs serve
        only beside others of their version: they take it together."""
        if self.paired:
            return 0
        allowed = max(1, int(self.update_share * self.instances))
        return 0 if allowed >= self.instances else allowed

    @property
    def canaries(self) -> int:
        """Engines that take a version before the others."""
        return max(1, int(self.canary.share * self.instances)) if self.canary is not None else 0

    @property
    def instances(self) -> int:
        """How many servers the group has."""
        if self.servers:
            return sum(part.started for part in self.servers)
        return self.count if self.url is None else len(self.url)
