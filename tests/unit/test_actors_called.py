"""A user's function at a moment of the run: its arguments, its deadline, and its failures by the key that names it."""

from __future__ import annotations

import asyncio

import pytest

from physarum.actors.called import HookFailedError, called
from physarum.configs.hook_call import HookCall

seen: list[tuple[int, str]] = []


async def notes(number: int, word: str) -> None:
    seen.append((number, word))


async def raises(number: int) -> None:
    raise KeyError(number)


async def hangs(number: int) -> None:
    await asyncio.Event().wait()


def call(name: str, **values: object) -> HookCall:
    return HookCall.model_validate({"hook": f"{__file__}:{name}", **values})


async def test_it_gets_what_it_is_given_and_its_own_arguments() -> None:
    await called(call("notes", args={"word": "x"}), "checkpoint.after_publish", 7)
    # A hook's file is imported under a name of its own.
    from physarum.configs.hooks import load_hook

    assert load_hook(f"{__file__}:seen") == [(7, "x")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"checkpoint\.after_publish: .*:raises raised KeyError: 7"),
        ("hangs", r"not done within 0\.1 s; make it quicker, or raise checkpoint\.after_publish\.timeout_s"),
    ],
)
async def test_its_failures_are_named(name: str, words: str) -> None:
    with pytest.raises(HookFailedError, match=words):
        await called(call(name, timeout_s=0.1), "checkpoint.after_publish", 7)
