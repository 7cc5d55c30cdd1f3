"""What an engine announces of its load, and how long a silent server is believed in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from physarum.actors.engine.control import Capabilities, Load
from physarum.actors.engine.errors import EngineTimeoutError, EngineUnreachableError
from physarum.actors.engine.load import UNREACHABLE, Announced, LoadReport, limit_rules
from physarum.actors.errors import ActorError
from physarum.configs.engine import ConcurrencyConfig, EngineConfig

CAN = Capabilities(
    version="0.5.23", spans=True, extra_key=True, flush_while_queued=True, radix_cache=True, update_sessions=True,
    ranks=1, longest_tokens=1000,
)  # fmt: skip
LOAD = Load(
    running=3, waiting=1, used_tokens=500, token_usage=0.05, generated_tokens_per_s=100.0, capacity_tokens=10_000,
    running_at_most=64, waiting_tokens=20,
)  # fmt: skip


class Control:
    """Answers what it was given, in turn; the last one for ever."""

    def __init__(self, *answers: Load | Exception) -> None:
        self.answers = list(answers)

    async def loads(self) -> Load:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Actor:
    """What a report needs of its actor."""

    def __init__(self) -> None:
        self.state = "ready"
        self.facts: dict[str, Any] = {"group": "policy"}
        self.numbers: dict[str, float] = {}
        self.announced = 0
        self.looked_at = 0

    def announce(self) -> None:
        self.announced += 1

    def silent(self, error: Exception) -> None:
        self.state = UNREACHABLE

    async def answered(self, whole: bool) -> None:
        if whole:
            self.looked_at += 1
            self.state = "ready"


def report(actor: Actor, control: Control, **settings: Any) -> LoadReport:
    return LoadReport(actor, EngineConfig(**settings), control, CAN)  # type: ignore[arg-type]


async def test_load_and_limit_are_announced_at_once() -> None:
    actor = Actor()
    await report(actor, Control(LOAD)).sample()
    announced = msgspec.convert(actor.facts["load"], Announced)
    assert announced == Announced(there=4, tokens=520, limit=8, capacity=10_000), "0.8 * 10,000 / 1,000 fit for sure"
    assert (actor.announced, actor.numbers["limit"], actor.facts["group"]) == (1, 8, "policy")


async def test_without_concurrency_there_is_no_limit() -> None:
    actor = Actor()
    await report(actor, Control(LOAD), concurrency=None).sample()
    assert msgspec.convert(actor.facts["load"], Announced).limit is None


async def test_one_silence_is_none_and_a_longer_one_takes_the_engine_out_until_it_answers() -> None:
    actor, error = Actor(), EngineTimeoutError("no answer")
    made = report(actor, Control(LOAD, error, error, error, LOAD))
    states = []
    for _ in range(5):
        await made.sample()
        states.append(actor.state)
    assert states == ["ready", "ready", "ready", UNREACHABLE, "ready"]
    assert actor.looked_at == 1, "whether it still serves what was put there"


async def test_somebody_elses_server_is_looked_at_each_time_and_goes_at_the_first_silence() -> None:
    actor = Actor()
    made = report(
        actor, Control(LOAD, EngineUnreachableError("gone")), url="http://127.0.0.1:1", unresponsive_timeout_s=1e-9
    )
    await made.sample()
    for _ in range(3):
        await made.sample()
    assert (actor.looked_at, actor.state) == (1, UNREACHABLE), "and is waited for, however long"


async def test_a_server_that_stays_silent_is_given_up_by_name() -> None:
    made = report(Actor(), Control(EngineTimeoutError("no answer")), unresponsive_timeout_s=1e-9)
    with pytest.raises(
        ActorError, match=r"has not reported its load .*unresponsive_timeout_s = 1e-09 s; it is started anew"
    ):
        await made.sample()


@pytest.mark.parametrize(
    ("config", "running_at_most", "ceiling"),
    [({}, 64, 64), ({"ceiling": 32}, 64, 32), ({}, 2, 4), ({}, None, 1 << 16)],
)
def test_the_ceiling_is_the_servers_own_where_none_is_configured(
    config: dict[str, Any], running_at_most: int | None, ceiling: int
) -> None:
    assert limit_rules(ConcurrencyConfig(**config), running_at_most, None).ceiling == ceiling


def test_what_is_announced_is_what_is_read() -> None:
    announced = Announced(there=3, tokens=5, limit=7, capacity=11)
    assert msgspec.convert(msgspec.to_builtins(announced), Announced) == announced
