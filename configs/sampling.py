"""How tokens are drawn: every sampling parameter of SGLang's /generate, under its name there.

Invariant: a name that is not here reaches no engine, whether it was written in the configuration, in a row or in a call; it is
refused with the nearest one. That the list is the installed release's own is a test (contract/test_sglang_sampling.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import orjson
from pydantic import Field, JsonValue, ValidationError

from physarum.configs.origin import Origins
from physarum.configs.problems import schema_problems
from physarum.configs.suggest import nearest
from physarum.configs.types import Count, Natural, Section

_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Texts = str | tuple[str, ...]


class SamplingConfig(Section):
    """Null leaves a parameter to the engine. Temperature 0 is refused: greedy tokens carry no log-probability to learn from.

    An engine's log-probabilities follow temperature, penalties and `logit_bias`, and come before `top_p`, `top_k` and `min_p`.
    The trainer knows the temperature, and with `replay.nucleus` the tokens that were kept; the others are seen as mismatch.
    """

    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1 keeps the whole vocabulary."""
    max_new_tokens: Count = 256
    """Per request to an engine."""
    stop_token_ids: tuple[Natural, ...] = ()
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_new_tokens: Natural | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    """By token id, written as text."""
    stop: _Texts | None = None
    stop_regex: _Texts | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    skip_special_tokens: bool | None = None
    """Of the engine's text, which nobody here reads; so is the next one."""
    spaces_between_special_tokens: bool | None = None
    sampling_seed: Natural | None = None
    """Each request gets a seed of its own, of this, its task and its prompt (agents/seeds.py); a call's is taken as it is.
    Engines follow seeds with `enable-deterministic-inference` alone; null then means `run.seed`."""
    custom_params: dict[str, JsonValue] | None = None
    watermark: JsonValue = None


NAMES: Final = frozenset(SamplingConfig.model_fields)
REFUSED: Final[Mapping[str, str]] = {
    "n": "call generate once per sample",
    "beam_width": "beams are not drawn from the policy, so that nothing could be learnt from them",
    "stream_interval": "rollout.stream_tokens says how answers come",
}
"""Of SGLang's, and why not."""


class SamplingNameError(ValueError):
    """A sampling parameter that is none, or cannot be honoured."""


def check_names(given: Mapping[str, Any]) -> None:
    """Raises SamplingNameError for the first name that no request may carry; 1 of `n` says nothing."""
    for name, value in given.items():
        if name in NAMES or (name == "n" and value in (None, 1)):
            continue
        if name in REFUSED:
            raise SamplingNameError(f"{name} is {value!r}; expected it to be left out: {REFUSED[name]}")
        near = nearest(name, NAMES)
        remedy = f"did you mean {near!r}" if near is not None else f"use one of: {', '.join(sorted(NAMES))}"
        raise SamplingNameError(f"{name!r} is no sampling parameter of SGLang; {remedy}")


def read_sampling(given: Any) -> dict[str, Any]:
    """What a row or a command gives, checked as the configuration is. Raises SamplingNameError naming what is wrong."""
    if not isinstance(given, Mapping):
        raise SamplingNameError(f"sampling parameters are {type(given).__name__}; expected a mapping")
    check_names(given)
    try:
        read = SamplingConfig.model_validate_json(orjson.dumps(dict(given)))
    except (ValidationError, TypeError) as error:
        found = schema_problems(error, SamplingConfig, Origins()) if isinstance(error, ValidationError) else [error]
        raise SamplingNameError("; ".join(map(str, found))) from error
    return parameters(read, read.model_fields_set)


def parameters(config: SamplingConfig, names: frozenset[str] | set[str] = NAMES) -> dict[str, Any]:
    """Under SGLang's names, as JSON has them; what is null, and an empty list of stop tokens, is left out."""
    given = config.model_dump(mode="json", include=set(names))
    return {name: value for name, value in given.items() if value is not None and (name != "stop_token_ids" or value)}
