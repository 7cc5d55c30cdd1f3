"""Work on large memory, spread over a few threads: hashing and copying release the interpreter's lock."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

THREADS: Final = min(8, len(os.sched_getaffinity(0)))
"""More saturate no memory, and take the cores of whoever trains or generates beside."""


def spread(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`work` of each item, in order. Raises what the first failing one raised, once all that had begun have ended."""
    listed = list(items)
    if min(THREADS, len(listed)) <= 1:
        return [work(item) for item in listed]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as pool:
        return list(pool.map(work, listed))


async def in_thread(work: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """As asyncio.to_thread; but who is cancelled waits for the thread, so that nothing is taken away under it."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, *arguments, **options))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait({thread})
        raise
