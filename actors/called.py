"""Calls a user's function at a moment of the run: with a deadline, and whatever goes wrong is one named error."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from physarum.actors.errors import ActorError
from physarum.configs.hook_call import HookCall
from physarum.configs.hooks import load_hook


class HookFailedError(ActorError):
    """A hook raised, or was not done in time."""


async def called(call: HookCall, key: str, *arguments: Any) -> None:
    """Awaits `call.hook(*arguments, **call.args)`. Raises HookFailedError naming `key`, the key of the configuration."""
    target = cast(Any, load_hook(call.hook))
    try:
        async with asyncio.timeout(call.timeout_s):
            await target(*arguments, **call.args)
    except TimeoutError as error:
        raise HookFailedError(
            f"{key}: {call.hook} was not done within {call.timeout_s:g} s; make it quicker, or raise {key}.timeout_s"
        ) from error
    except Exception as error:
        raise HookFailedError(f"{key}: {call.hook} raised {type(error).__name__}: {error}") from error
