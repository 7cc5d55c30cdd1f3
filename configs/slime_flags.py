"""slime's command line, as far as it describes engines: `--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.8 ...`.

Words are taken from a command line or from the shell script that holds one. Invariant: a flag of engines is read or refused by
name; what only a shell can know (`$TP`) is refused; flags of other parts are named in `left_out`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import JsonValue

from physarum.configs.errors import ConfigError, Problem, Severity
from physarum.configs.suggest import nearest
from physarum.configs.yaml_file import parse_value

_NUMBERS: Final = {
    "rollout-num-gpus": "gpus",
    "rollout-num-gpus-per-engine": "gpus_per_engine",
    "num-gpus-per-node": "gpus_per_node",
    "prefill-num-servers": "prefill_servers",
    "sglang-server-concurrency": "requests",
    "sglang-router-port": "router_port",
    "sglang-router-request-timeout-secs": "request_timeout_s",
}
_TEXTS: Final = {"hf-checkpoint": "checkpoint", "sglang-router-ip": "router_ip", "sglang-config": "config_file"}
_LISTS: Final = {"rollout-external-engine-addrs": "external"}
_LOOSE: Final = ("rollout-num-gpu", "num-gpus-per", "prefill-num", "rollout-external")
"""What a misspelt flag of engines begins with."""
_PUNCTUATION: Final = "();&|<>"


@dataclass(frozen=True, kw_only=True)
class SlimeFlags:
    """What was said. `sglang` and `router` are arguments of those programs, in their own spelling."""

    checkpoint: str | None = None
    config_file: str | None = None
    gpus: int | None = None
    gpus_per_engine: int = 1
    gpus_per_node: int = 8
    prefill_servers: int | None = None
    external: tuple[str, ...] = ()
    router_ip: str | None = None
    router_port: int | None = None
    request_timeout_s: int | None = None
    requests: int | None = None
    sglang: dict[str, JsonValue] = field(default_factory=dict)
    router: dict[str, JsonValue] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def words_of_script(text: str, name: str) -> list[str]:
    """The words of a shell script; what groups and separates commands is a word of its own. Raises ConfigError."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError as error:
        found = f"a script that cannot be read as words ({error})"
        raise ConfigError(
            [_refusal(name, found, "quotes that are closed", "give the flags on the command line")]
        ) from None


def parse_flags(words: Sequence[str]) -> SlimeFlags:
    """Raises ConfigError naming every flag of engines that cannot be read."""
    values: dict[str, object] = {}
    programs: dict[str, dict[str, JsonValue]] = {"sglang": {}, "router": {}}
    left_out: list[str] = []
    problems: list[Problem] = []
    for name, given in _flags(words):
        try:
            if not _take(name, given, values, programs):
                left_out.append(f"--{name}")
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    unique = tuple(dict.fromkeys(left_out))
    return SlimeFlags(**values, **programs, left_out=unique)  # type: ignore[arg-type]  # each was read as its field's type


def _flags(words: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    """Each flag and the words behind it."""
    name, given = "", list[str]()
    for word in words:
        if word.startswith("--") and len(word) > 2:
            if name:
                yield name, given
            name, equals, value = word.removeprefix("--").partition("=")
            name, given = name.replace("_", "-"), [value] if equals else []
        elif name and set(word) <= set(_PUNCTUATION):
            yield name, given
            name, given = "", []
        elif name:
            given.append(word)
    if name:
        yield name, given


def _take(name: str, given: list[str], values: dict[str, object], programs: dict[str, dict[str, JsonValue]]) -> bool:
    """Whether it is a flag of engines."""
    if name in _NUMBERS:
        values[_NUMBERS[name]] = _number(name, _one(name, given))
    elif name in _TEXTS:
        values[_TEXTS[name]] = _plain(name, _one(name, given))
    elif name in _LISTS:
        values[_LISTS[name]] = tuple(_plain(name, word) for word in given)
    elif (found := re.fullmatch(r"(?:sglang-)?router-(.+)", name)) is not None:
        programs["router"][found[1]] = _value(name, given)
    elif name.startswith("sglang-"):
        programs["sglang"][name.removeprefix("sglang-")] = _value(name, given)
    elif name.startswith(_LOOSE):
        near = nearest(name, (*_NUMBERS, *_TEXTS, *_LISTS))
        remedy = f"did you mean `--{near}`" if near else "remove it"
        raise ConfigError([_refusal(f"--{name}", f"`--{name}`", "a flag of slime", remedy)])
    else:
        return False
    return True


def _one(name: str, given: list[str]) -> str:
    if len(given) != 1:
        found = " ".join(given) or "nothing"
        raise ConfigError([_refusal(f"--{name}", found, "one value", f"write `--{name} VALUE`")])
    return given[0]


def _plain(name: str, word: str) -> str:
    if "$" in word or "`" in word:
        remedy = f"give `--{name}` with its value behind the script's name"
        raise ConfigError([_refusal(f"--{name}", f"`{word}`, which only a shell can know", "a value", remedy)])
    return word


def _number(name: str, word: str) -> int:
    if not re.fullmatch(r"\d+", _plain(name, word)):
        raise ConfigError([_refusal(f"--{name}", repr(word), "a whole number", f"write `--{name} N`")])
    return int(word)


def _value(name: str, given: list[str]) -> JsonValue:
    """A switch is true; several words are a list."""
    found = [parse_value(_plain(name, word), f"--{name}") for word in given]
    return True if not found else found[0] if len(found) == 1 else found


def _refusal(where: str, found: str, expected: str, remedy: str) -> Problem:
    return Problem(Severity.ERROR, where, found, expected, remedy)
