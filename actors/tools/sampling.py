"""The sampling of a run that goes on, looked up and changed: what is asked for is laid over `rollout.sampling`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from physarum.actors import states
from physarum.actors.engine.environment import detect_device, engine_environment, engine_python
from physarum.actors.engine.schema import remembered_server
from physarum.actors.policy_engines import policy_group
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import RunUnfitError
from physarum.bus.register import Register
from physarum.configs.sampling import SamplingNameError, parameters, read_sampling

_FIXED: Final = {
    "temperature": "the trainer computes every log-probability at the one it began with",
    "sampling_seed": "requests that were made already would not be made again",
}


async def sampling(run: OpenRun) -> dict[str, Any]:
    """The parameters of the run's training requests as they are now; rows and calls lay theirs over these."""
    found = (await _register(run).get(states.SAMPLING)).value
    return {**parameters(run.config.rollout.sampling), **({} if found is None else found.values)}


async def change_sampling(run: OpenRun, changes: Sequence[str], reset: bool = False) -> dict[str, Any]:
    """Applies `top_p=0.9 max_new_tokens=2048`, all or none; `reset` forgets earlier changes. Raises RunUnfitError."""
    if run.finished:
        raise RunUnfitError(f"run {run.name} is finished: nothing is sampled in it any more")
    given = _read(changes)
    await _refuse_unknown(run, given)
    register = _register(run)
    entry = await register.get(states.SAMPLING)
    before = {} if reset or entry.value is None else entry.value.values
    changed = states.ChangedSampling({**before, **given}, time.time())
    await register.compare_and_set(changed, entry.revision, states.SAMPLING)
    return {**parameters(run.config.rollout.sampling), **changed.values}


async def _refuse_unknown(run: OpenRun, given: Mapping[str, Any]) -> None:
    """Of a parameter that the installed SGLang does not know, every answer would be a refusal. What runs at a `url`, or was
    never started on this host, cannot be asked."""
    group = run.config.engines[policy_group(run.config)]
    if not given or group.url is not None:
        return
    environment, cache = engine_environment(detect_device(), group.env), run.folder.path.parent / ".cache"
    schema = await remembered_server(engine_python(group), environment, cache)
    unknown = sorted(given.keys() - set(schema.sampling)) if schema is not None and schema.sampling else []
    if schema is not None and unknown:
        raise RunUnfitError(
            f"sglang {schema.version}, which this run's engines are, has no sampling parameter {unknown[0]}; leave it out, or"
            " install a release that has it"
        )


def _read(changes: Sequence[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for text in changes:
        name, sign, value = text.partition("=")
        if not sign:
            raise RunUnfitError(f"found {text!r}; expected NAME=VALUE, for example top_p=0.95")
        if name in _FIXED:
            raise RunUnfitError(
                f"{name} cannot be changed while a run goes on: {_FIXED[name]}. Start another run (fork)"
            )
        given[name] = _value(value)
    try:
        return read_sampling(given)
    except SamplingNameError as error:
        raise RunUnfitError(str(error)) from None


def _value(text: str) -> Any:
    """JSON where it is that, else a text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _register(run: OpenRun) -> Register[states.ChangedSampling]:
    return Register(run.bus, run.publisher, "run", states.ChangedSampling)
