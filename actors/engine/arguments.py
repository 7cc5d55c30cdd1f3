"""From `engines.<group>.sglang` to a command line: user arguments pass through, checked against the installed server.

Invariant: nothing is renamed, interpreted or dropped. An argument that the server does not know, or that physarum must
set itself, is refused before a process starts. User values replace our defaults; null removes a default.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from physarum.actors.engine.environment import Device
from physarum.actors.engine.errors import EngineArgumentError
from physarum.actors.engine.schema import Argument, ServerSchema
from physarum.configs.servers import ServerRole
from physarum.configs.sglang_arguments import RESERVED, canonical

_DETERMINISTIC: Final = ("enable-deterministic-inference", "rl-on-policy-target")

# Measured: without dtype a float32 checkpoint is served as float16; without max-total-tokens the KV pool takes 13.7 GB.
# The first health probe generates a token, so the server's own warm-up adds nothing.
_CPU_DEFAULTS: Final[Mapping[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",
    "grammar-backend": "none",
    "max-total-tokens": 65536,
    "max-running-requests": 64,
    "mem-fraction-static": 0.3,
    "skip-server-warmup": True,
}


def server_command(
    python: Path,
    model: Path,
    port: int,
    label: str,
    user: Mapping[str, Any],
    device: Device,
    schema: ServerSchema,
    own: Mapping[str, Any] | None = None,
    host: str = "127.0.0.1",
) -> list[str]:
    """The whole command of one server; `own` are arguments that its place among others asks for, `host` where it listens.

    Raises EngineArgumentError naming every argument that cannot stand.
    """
    arguments = {**default_arguments(device, schema), **checked_arguments(user, schema)}
    _check_device(arguments, device)
    known = schema.by_name()
    if missing := [name for name in own or {} if name not in known]:
        raise EngineArgumentError(
            f"sglang {schema.version} has no argument {', '.join(missing)}, which this server's role needs; use another release"
        )
    arguments |= own or {}
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--host", host]
    command += ["--port", str(port), "--weight-version", label]
    for name, value in arguments.items():
        command += render(known[name], name, value)
    return command


def role_arguments(role: ServerRole, bootstrap_port: int, language_only: bool = False) -> dict[str, Any]:
    """What the role of a server sets. The bootstrap port is a prefill server's own: a request names it to the decode server; or
    that of a server of the language model alone, whose encoders its actor registers there."""
    if language_only and role == "regular":
        return {"language-only": True, "encoder-bootstrap-port": bootstrap_port}
    match role:
        case "prefill":
            return {"disaggregation-mode": role, "disaggregation-bootstrap-port": bootstrap_port}
        case "decode":
            return {"disaggregation-mode": role}
        case "encoder":
            return {"encoder-only": True}
        case _:
            return {}


def _check_device(arguments: Mapping[str, Any], device: Device) -> None:
    """Without CUDA the server ends while it starts: none of its attention backends there is deterministic."""
    asked = [name for name in _DETERMINISTIC if arguments.get(name)]
    if device == "cpu" and asked:
        raise EngineArgumentError(
            f"sglang argument {asked[0]} is set, and SGLang is deterministic on CUDA alone; remove it on a host without"
        )


def default_arguments(device: Device, schema: ServerSchema) -> dict[str, Any]:
    """What physarum sets unless the user says otherwise, in the words of the installed release."""
    known = schema.by_name()
    # Without it /v1/loads reports neither tokens per second nor preemptions, on which the engine's limit rests.
    defaults: dict[str, Any] = {"enable-metrics": True} if "enable-metrics" in known else {}
    if "incremental-streaming-output" in known:  # else each chunk of a streamed answer repeats those before it
        defaults["incremental-streaming-output"] = True
    if device == "cpu":
        defaults |= _CPU_DEFAULTS
        if "cuda-graph-backend-decode" in known:
            defaults |= {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"}
        else:
            defaults["disable-cuda-graph"] = True
        if "sleep-on-idle" in known:  # measured: its scheduler takes 0.8 of a core while it waits for requests
            defaults["sleep-on-idle"] = True
    return defaults


class Rules(NamedTuple):
    """Of a program: its name and module for messages, and what physarum sets itself, with what to write instead."""

    name: str
    module: str
    reserved: Mapping[str, str]


SERVER: Final = Rules("sglang", "sglang.launch_server", RESERVED)


def checked_arguments(user: Mapping[str, Any], schema: ServerSchema, rules: Rules = SERVER) -> dict[str, Any]:
    """`user` with canonical names. Raises EngineArgumentError listing all problems at once."""
    known = schema.by_name()
    checked: dict[str, Any] = {}
    problems: list[str] = []
    for written, value in user.items():
        name = canonical(written)
        problem = _problem(name, value, known, schema.version, rules)
        if name in checked:
            problem = f"{written}: given twice (- and _ are the same here); keep one"
        if problem is not None:
            problems.append(problem)
        checked[name] = value
    if problems:
        raise EngineArgumentError("; ".join(problems))
    return checked


def check_sampling(names: Collection[str], schema: ServerSchema) -> None:
    """Raises EngineArgumentError for a sampling parameter that the installed release does not know; its answers would all be
    refusals."""
    unknown = sorted(set(names) - set(schema.sampling)) if schema.sampling else []
    if unknown:
        raise EngineArgumentError(
            f"sglang {schema.version} has no sampling parameter {unknown[0]}; remove it from rollout.sampling, or"
            " install a release that has it"
        )


def _problem(name: str, value: Any, known: Mapping[str, Argument], version: str, rules: Rules) -> str | None:
    program = rules.name
    if name in rules.reserved:
        return f"{program} argument {name} cannot be set here: {rules.reserved[name]}"
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else f"; see `python -m {rules.module} --help`"
        return f"{program} {version} has no argument {name}{hint}"
    argument = known[name]
    if argument.is_switch and not isinstance(value, bool | None):
        return f"{program} argument {name} is a switch: found {value!r}, expected true or false"
    if not argument.is_switch and isinstance(value, bool) and argument.number != "?":
        return f"{program} argument {name} takes a value: found {value!r}"
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and argument.number in (1, 0):
        return f"{program} argument {name} takes one value: found the list {value!r}"
    wrong = [one for one in values if one is not None and argument.choices and str(one) not in argument.choices]
    if wrong and not argument.is_switch:
        return f"{program} argument {name} is {wrong[0]!r}, expected one of {', '.join(argument.choices or [])}"
    return None


def render(argument: Argument, name: str, value: Any) -> list[str]:
    """As words of a command line; null is none."""
    flag = f"--{name}"
    if value is None:
        return []
    if argument.is_switch:
        return [flag] if value else [argument.negation] if argument.negation else []
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        return [flag, *(str(one) for one in value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
