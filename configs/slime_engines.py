"""slime's `--sglang-config` file read as `engines:`, with what its command line says of engines.

    sglang: [{name, model_path, update_weights, num_gpus_per_engine,
              server_groups: [{worker_type, num_gpus, num_gpus_per_engine, overrides}]}]      (or `engine_groups`)

Rules are slime's own: a group's `num_gpus_per_engine`, then its model's, then the flag; overrides over `--sglang-*`; a model
of another path than `--hf-checkpoint` is not updated unless it says so; at most one is. Invariant: each key is translated or
refused by name, with the nearest known one. What lies outside a group in slime (routers) is in the group here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pydantic import JsonValue

from physarum.configs.errors import ConfigError, Problem, Severity
from physarum.configs.origin import KeyPath, Origins, dotted
from physarum.configs.servers import PAIRED
from physarum.configs.slime_flags import SlimeFlags
from physarum.configs.suggest import nearest
from physarum.configs.yaml_file import Layer

KEY: Final = "sglang"
_MODEL: Final = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
_GROUP: Final = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
_TYPES: Final = ("regular", "prefill", "decode", "placeholder", "encoder")
_PIPELINE: Final = ("pp-size", "pipeline-parallel-size")
_TENSOR: Final = ("tp-size", "tensor-parallel-size")
_OWN: Final = {
    "model-path": "it is the model's: write `model_path` beside `name`",
    "host": "physarum chooses where its engines listen",
    "port": "physarum chooses free ports",
    "nccl-port": "physarum leaves it to SGLang",
    "nnodes": "it follows from num_gpus_per_engine and --num-gpus-per-node",
    "node-rank": "it follows from num_gpus_per_engine and --num-gpus-per-node",
    "dist-init-addr": "physarum chooses it",
    "base-gpu-id": "physarum shows each server its own devices",
    "disaggregation-mode": "it follows from worker_type",
    "disaggregation-bootstrap-port": "physarum chooses free ports",
    "encoder-only": "it follows from worker_type",
    "language-only": "it follows from worker_type",
    "encoder-urls": "physarum tells the servers where the encoders are",
}


class Imported(NamedTuple):
    """`{engines: ...}`, and `rollout:` where a flag is of requests; and the flags that have no place there."""

    values: dict[str, JsonValue]
    left_out: tuple[str, ...]


def import_engines(layer: Layer, flags: SlimeFlags) -> Imported:
    """An empty layer stands for a command line without a file. Raises ConfigError with every problem."""
    reading = _Reading(Origins(layer.origins), flags)
    engines = reading.external() if flags.external else reading.models(_models(layer, flags, reading))
    if flags.external and layer.values:
        reading.refuse((KEY,), "a file and `--rollout-external-engine-addrs`", "one of them", "leave one out")
    if reading.problems:
        raise ConfigError(reading.problems)
    found: dict[str, JsonValue] = {"engines": engines}
    if flags.request_timeout_s is not None:
        found["rollout"] = {"request_timeout_s": float(flags.request_timeout_s)}
    return Imported(found, (*flags.left_out, *reading.routers_left_out()))


def _models(layer: Layer, flags: SlimeFlags, reading: _Reading) -> list[Any]:
    """Of the file; without one, what slime makes of its flags."""
    if not layer.values:
        return [{"name": "policy", "server_groups": reading.groups_of_flags()}]
    for name in layer.values:
        if name != KEY:
            reading.unknown((name,), name, (KEY,))
    models = layer.values.get(KEY)
    if not isinstance(models, list) or not models:
        reading.refuse((KEY,), "no list `sglang`", "slime's --sglang-config", "write `sglang: [{name: ...}]`")
        return []
    if flags.prefill_servers is not None:
        reading.refuse((KEY,), "a file and `--prefill-num-servers`", "one of them", "leave the flag out")
    return models


class _Reading:
    """One translation; what is wrong is collected."""

    def __init__(self, origins: Origins, flags: SlimeFlags) -> None:
        self._origins, self._flags = origins, flags
        self.problems: list[Problem] = []
        self._router_placed = False

    def refuse(self, key: KeyPath, found: str, expected: str, remedy: str) -> None:
        where = self._origins.where(key) if self._origins.find(key) is not None else dotted(key)
        self.problems.append(Problem(Severity.ERROR, where, found, expected, remedy))

    def unknown(self, key: KeyPath, name: str, known: Sequence[str]) -> None:
        near = nearest(name, known)
        remedy = f"did you mean `{near}`" if near else f"remove it; there are: {', '.join(known)}"
        self.refuse(key, f"unknown key `{name}`", "a key of slime's --sglang-config", remedy)

    def external(self) -> dict[str, JsonValue]:
        """Engines that somebody else started."""
        urls = [one if "//" in one else f"http://{one}" for one in self._flags.external]
        for name in self._flags.sglang:
            remedy = "start the servers with it yourself, and leave it out"
            self.refuse((f"--sglang-{name}",), f"`--sglang-{name}` for engines that run", "servers to start", remedy)
        return {"policy": {"url": list(urls), **self._beside(through=True)}}

    def groups_of_flags(self) -> list[dict[str, JsonValue]]:
        """As slime's `--prefill-num-servers`, or equal engines on `--rollout-num-gpus`."""
        flags, total = self._flags, self._flags.gpus
        if total is None:
            self.refuse(
                ("--rollout-num-gpus",), "no file, and no such flag", "one of them", "add `--rollout-num-gpus N`"
            )
            return []
        if flags.prefill_servers is None:
            return [{"worker_type": "regular", "num_gpus": total}]
        prefill = flags.prefill_servers * flags.gpus_per_engine
        return [{"worker_type": "prefill", "num_gpus": prefill}, {"worker_type": "decode", "num_gpus": total - prefill}]

    def models(self, models: list[Any]) -> dict[str, JsonValue]:
        engines: dict[str, JsonValue] = {}
        updated: list[str] = []
        asked = 0
        for index, model in enumerate(models):
            key: KeyPath = (KEY, index)
            if not isinstance(model, dict) or not isinstance(model.get("name"), str):
                self.refuse(key, "a model without `name`", "a mapping with `name`", "name it")
                continue
            name = re.sub(r"[^a-z0-9-]+", "-", model["name"].lower())[:32]
            if name in engines:
                self.refuse((*key, "name"), f"a second model `{name}`", "names of their own", "rename one")
            follows = self._model(key, model)
            updated += [name] if follows else []
            own = {} if follows else {"model": model.get("model_path") or self._flags.checkpoint}
            parts, gpus = self._parts(key, model, follows)
            asked_alone = follows and not any(part["role"] in PAIRED for part in parts)
            engines[name] = {**own, **self._shape(parts), **self._beside(through=index == 0 and asked_alone)}
            asked += gpus
        if len(updated) > 1:
            self.refuse(
                (KEY,), f"{len(updated)} models with `update_weights`: {', '.join(updated)}", "one", "freeze others"
            )
        if self._flags.gpus is not None and asked != self._flags.gpus and not self.problems:
            found = f"{asked} GPUs in all groups with `--rollout-num-gpus {self._flags.gpus}`"
            self.refuse((KEY,), found, "the same number", "correct one of them")
        return engines

    def _model(self, key: KeyPath, model: dict[str, Any]) -> bool:
        """Whether it follows the policy's versions, as slime infers it."""
        for name in model:
            if name not in _MODEL:
                self.unknown((*key, name), name, _MODEL)
        path, checkpoint, says = model.get("model_path"), self._flags.checkpoint, model.get("update_weights")
        if says is not None and not isinstance(says, bool):
            self.refuse((*key, "update_weights"), repr(says), "true or false", "correct it")
        if says is None and path is not None and checkpoint is None:
            found = "a `model_path` without `update_weights`, and no `--hf-checkpoint` to compare it with"
            self.refuse(
                (*key, "model_path"), found, "one of them", "add `update_weights: false`, or give --hf-checkpoint"
            )
        follows = bool(says) if says is not None else path is None or path == checkpoint
        if follows and path is not None and checkpoint is not None and path != checkpoint:
            found = f"`model_path: {path}` with `update_weights: true` and `--hf-checkpoint {checkpoint}`"
            remedy = "remove `model_path`: engines that follow the policy start from it"
            self.refuse((*key, "model_path"), found, "the policy's own model", remedy)
        if not follows and path is None and checkpoint is None:
            self.refuse(
                key, "a frozen model without `model_path`", "its folder", "add `model_path`, or give --hf-checkpoint"
            )
        return follows

    def _parts(self, key: KeyPath, model: dict[str, Any], follows: bool) -> tuple[list[dict[str, JsonValue]], int]:
        """The model's groups as parts, and their devices."""
        if "server_groups" in model and "engine_groups" in model:
            self.refuse((*key, "engine_groups"), "`server_groups` and `engine_groups`", "one of them", "remove one")
        name = "server_groups" if "server_groups" in model else "engine_groups"
        groups = model.get(name)
        if not isinstance(groups, list) or not groups:
            self.refuse((*key, name), "no list of groups", "`server_groups: [{worker_type, num_gpus}]`", "add one")
            return [], 0
        parts, asked = list[dict[str, JsonValue]](), 0
        for index, group in enumerate(groups):
            at: KeyPath = (*key, name, index)
            if not isinstance(group, dict) or not self._known(at, group):
                continue
            if group["worker_type"] in PAIRED and not follows:
                remedy = "make its servers `regular`: who asks a frozen model asks one server"
                self.refuse((*at, "worker_type"), "prefill or decode servers of a frozen model", "`regular`", remedy)
            part = self._part(at, group, model.get("num_gpus_per_engine"))
            asked += group["num_gpus"]
            parts += [part] if part is not None else []
        return parts, asked

    def _known(self, key: KeyPath, group: dict[str, Any]) -> bool:
        before = len(self.problems)
        for name in group:
            if name not in _GROUP:
                self.unknown((*key, name), name, _GROUP)
        if group.get("worker_type") not in _TYPES:
            near = nearest(str(group.get("worker_type")), _TYPES)
            remedy = f"did you mean `{near}`" if near else "name one"
            self.refuse((*key, "worker_type"), repr(group.get("worker_type")), f"one of {', '.join(_TYPES)}", remedy)
        for name in ("num_gpus", "num_gpus_per_engine"):
            value = group.get(name)
            if (value is not None or name == "num_gpus") and not _is_count(value):
                self.refuse((*key, name), repr(value), "a whole number above 0", f"correct `{name}`")
        if not isinstance(group.get("overrides") or {}, dict):
            self.refuse((*key, "overrides"), repr(group["overrides"]), "a mapping of SGLang's arguments", "correct it")
        return len(self.problems) == before

    def _part(self, key: KeyPath, group: dict[str, Any], of_model: Any) -> dict[str, JsonValue] | None:
        gpus: int = group["num_gpus"]
        if group["worker_type"] == "placeholder":
            return {"role": "placeholder", "gpus": gpus}
        each = group.get("num_gpus_per_engine") or of_model or self._flags.gpus_per_engine
        if not _is_count(each) or gpus % each:
            found = f"`num_gpus: {gpus}` with `num_gpus_per_engine: {each}`"
            self.refuse((*key, "num_gpus"), found, "a multiple", "correct one of them")
            return None
        per_node = self._flags.gpus_per_node
        if each > per_node and each % per_node:
            found = f"`num_gpus_per_engine: {each}` with {per_node} GPUs in a node"
            self.refuse((*key, "num_gpus_per_engine"), found, "whole nodes", "correct it, or give --num-gpus-per-node")
        overrides = {name.replace("_", "-"): value for name, value in (group.get("overrides") or {}).items()}
        arguments = self._own_arguments(key, overrides, each)
        nodes = {"nodes": each // per_node} if each > per_node else {}
        role = group["worker_type"]
        return {
            "role": role,
            "count": gpus // each,
            **nodes,
            "gpus": gpus,
            **({"sglang": arguments} if arguments else {}),
        }

    def _own_arguments(self, key: KeyPath, overrides: dict[str, Any], each: int) -> dict[str, JsonValue]:
        """The overrides, and the tensor-parallel size that slime derives from the devices of one engine."""
        for name in sorted(overrides.keys() & _OWN.keys()):
            self.refuse(
                (*key, "overrides"), f"the override `{name}`", "SGLang's other arguments", f"remove it: {_OWN[name]}"
            )
        given = {**self._flags.sglang, **overrides}
        stages = next((given[name] for name in _PIPELINE if name in given), 1)
        size = next((overrides[name] for name in _TENSOR if name in overrides), None)
        if not _is_count(stages) or each % stages or (size is not None and size * stages != each):
            found = f"tp_size {size}, pp_size {stages} for {each} GPUs of an engine"
            self.refuse((*key, "overrides"), found, "tp_size * pp_size = num_gpus_per_engine", "correct one of them")
            return overrides
        derived = {"tp-size": each // stages} if size is None and each // stages > 1 else {}
        return {**derived, **overrides}

    def _shape(self, parts: list[dict[str, JsonValue]]) -> dict[str, JsonValue]:
        """One part of regular servers is the group itself."""
        common = dict(self._flags.sglang)
        if len(parts) != 1 or parts[0]["role"] != "regular":
            return {"servers": list(parts), **({"sglang": common} if common else {})}
        alone = {name: value for name, value in parts[0].items() if name not in ("role", "sglang")}
        own = parts[0].get("sglang")
        arguments = {**common, **(own if isinstance(own, dict) else {})}
        return {**alone, **({"sglang": arguments} if arguments else {})}

    def _beside(self, through: bool) -> dict[str, JsonValue]:
        """Limits and routers. slime's router address is that of the first model; `through`: it may have one here, where pairs
        are chosen by rollout actors and frozen models are asked directly."""
        flags, found = self._flags, dict[str, JsonValue]()
        if flags.requests is not None:
            found["concurrency"] = {"ceiling": flags.requests, "floor": min(4, flags.requests)}
        if not through:
            return found
        if flags.router_ip is not None:
            host = f"[{flags.router_ip}]" if ":" in flags.router_ip else flags.router_ip
            found["router"] = f"http://{host}:{flags.router_port or 30000}"
        elif flags.router:
            found["start_router"] = dict(flags.router)
        self._router_placed = True
        return found

    def routers_left_out(self) -> list[str]:
        """Flags of a router that no group may have."""
        if self._router_placed:
            return []
        named = ["--sglang-router-ip"] if self._flags.router_ip is not None else []
        return named + [f"--router-{name}" for name in self._flags.router]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
