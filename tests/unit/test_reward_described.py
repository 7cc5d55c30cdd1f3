"""What a dead letter says of a hook's error."""

from __future__ import annotations

import asyncio

from physarum.actors.reward.worker import raised


async def test_of_errors_that_come_together_the_first_is_named() -> None:
    """A judge that could not be reached was "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)"."""

    async def fails() -> None:
        raise ConnectionError("the judge answered 503")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
    except ExceptionGroup as error:
        told = raised(1, error)
    assert told.reason.startswith("ConnectionError: the judge answered 503 (")
    assert "test_reward_described.py" in told.reason and not told.unavailable
