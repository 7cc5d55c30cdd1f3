"""Sampling that is changed while episodes are parked: what was in flight ends as it began, what begins has the change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from physarum.agents.client import EngineClient
from physarum.agents.engine_wire import Reply
from physarum.agents.held import Held
from physarum.agents.protocols import FinishReason, Generation
from physarum.bus.codec import decode, encode
from physarum.bus.records import Begun, Task
from physarum.bus.version import Span

pytestmark = pytest.mark.timeout(20)


class Client(EngineClient):
    """Each request makes three tokens, with whatever sampling it has, and ends as `ends`."""

    ends: FinishReason = "abort"

    def __init__(self) -> None:
        super().__init__(None, None, None)  # type: ignore[arg-type]  # nothing is sent
        self.seen: list[tuple[int, Mapping[str, Any]]] = []

    async def _finish(self, held: Held) -> Generation:
        self.seen.append((held.count, held.sampling))
        if not held.finished:
            held.add(
                Reply(
                    token_ids=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32), spans=[Span("p@1.1", 0, 3)],
                    finish_reason=self.ends, cached_tokens=0, flaw=None,
                ), "rid",
            )  # fmt: skip
        return held.generation()


def task(begun: list[Begun], **sampling: Any) -> Task:
    return Task(
        id="s/0/0/0", run="r", source="s", ordinal=0, group="g", group_size=1, member=0, begun=begun,
        sampling={"top_p": 1.0, "max_new_tokens": 9, **sampling},
    )  # fmt: skip


async def parked(client: Client, **sampling: Any) -> list[Begun]:
    """What one worker made of [1, 2] before it drained, as another reads it."""
    view = client.for_task(task([], **sampling))
    await view.generate([1, 2])
    assert view.journal is not None
    return decode(encode(view.journal.begun()), list[Begun])


@pytest.mark.parametrize("before", [{}, {"top_p": 0.9}])
async def test_a_parked_generation_goes_on_as_it_began_when_sampling_was_changed_meanwhile(
    before: dict[str, Any],
) -> None:
    client = Client()
    client.live.values = before
    begun = await parked(client)
    client.live.values, client.ends = {"top_p": 0.5, "max_new_tokens": 7}, "stop"
    view = client.for_task(task(begun))
    made = await view.generate([1, 2])
    assert len(made.token_ids) == 6, "three were held"
    await view.generate([5])
    (_, first), (held, goes_on), (_, begins) = client.seen
    assert held == 3 and goes_on == first and first["top_p"] == before.get("top_p", 1.0)
    assert (begins["top_p"], begins["max_new_tokens"]) == (0.5, 7)


async def test_what_an_engine_cannot_go_on_behind_is_made_anew_with_the_change() -> None:
    client = Client()
    begun = await parked(client, presence_penalty=1.0)
    client.live.values, client.ends = {"top_p": 0.5}, "stop"
    assert len((await client.for_task(task(begun, presence_penalty=1.0)).generate([1, 2])).token_ids) == 3
    assert client.seen[-1] == (0, {"top_p": 0.5, "max_new_tokens": 9, "presence_penalty": 1.0})


async def test_another_request_of_the_episode_is_not_answered_with_what_was_held() -> None:
    client = Client()
    begun = await parked(client)
    client.live.values = {"top_p": 0.5}
    await client.for_task(task(begun)).generate([1, 2], {"top_k": 3})
    assert client.seen[-1][0] == 0
