"""Asking a mirror: a process for each request, ended when the store is silent for too long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Final, TypeVar

import msgspec

from physarum.actors.mirror.errors import MirrorError, MirrorUnfitError
from physarum.actors.mirror.records import Answer, Asked, Failed, Moved, Request
from physarum.configs.root import RootConfig

T = TypeVar("T", bound=Answer)

COMMAND: Final = (sys.executable, "-m", "physarum.actors.mirror.process")
_LINE_BYTES: Final = 64 << 20
_answers: Final = msgspec.json.Decoder(Answer)


def versions_url(config: RootConfig) -> str | None:
    """Where the versions of this run are copied to; None: nowhere."""
    versions = config.checkpoint.versions
    return None if versions is None else f"{versions.mirror.rstrip('/')}/{config.run.name}/weights"


def mirror_url(config: RootConfig) -> str | None:
    """Where the checkpoints of this run are copied to; None: nowhere."""
    url = config.checkpoint.mirror
    return None if url is None else f"{url.rstrip('/')}/{config.run.name}"


async def ask(request: Request, expected: type[T], silence_s: float, setting: str = "mirror_timeout_s") -> T:
    """The answer. Raises MirrorError after `silence_s` in which nothing moved (naming `setting`), or what the process says."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LINE_BYTES
    )
    assert process.stdin is not None and process.stdout is not None  # both were asked for
    try:
        process.stdin.write(msgspec.json.encode(Asked(os.getpid(), request)) + b"\n")
        return await _answer(process.stdout, request.url, expected, silence_s, setting)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _answer(lines: asyncio.StreamReader, url: str, expected: type[T], silence_s: float, setting: str) -> T:
    while True:
        try:
            async with asyncio.timeout(silence_s):
                line = await lines.readline()
        except TimeoutError as error:
            raise MirrorError(
                f"{url}: the store was silent for {silence_s:g} s; see to the network, or raise checkpoint.{setting}"
            ) from error
        if not line:
            raise MirrorError(f"{url}: the process that speaks to the store ended without an answer; the log says why")
        match _answers.decode(line):
            case Moved():
                continue
            case Failed(reason=reason, unfit=unfit):
                raise MirrorUnfitError(reason) if unfit else MirrorError(reason)
            case expected() as answer:
                return answer
            case other:
                raise MirrorError(f"{url}: answered {type(other).__name__}; expected {expected.__name__}")
