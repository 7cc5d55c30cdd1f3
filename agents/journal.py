"""What an episode has generated so far, so that an interrupted one goes on instead of beginning again.

Invariant: a generation is handed out again only for the very request that made it (the same tokens, the same sampling but for
what was changed for the whole run meanwhile: a generation in flight ends as it began, whoever ends it).
The generate hook simply runs anew: as long as its environment answers as before, it gets its own generations back, token
for token with their versions; where it asks for something else, engines generate.

    episode --open(prompt, sampling)--> Held   interrupted: begun() --Task.begun--> another worker's Journal --> open ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from physarum.agents.held import Held
from physarum.agents.protocols import Generation
from physarum.bus.records import Begun


class Journal:
    """The generations of one run of one task; `begun` are those of its earlier runs."""

    def __init__(self, begun: Iterable[Begun] = ()) -> None:
        self._earlier: dict[str, deque[Begun]] = {}
        for one in begun:
            self._earlier.setdefault(one.request, deque()).append(one)
        self._opened: list[tuple[str, Held]] = []

    def open(
        self,
        prompt: npt.NDArray[np.int32],
        sampling: dict[str, Any],
        routed_from: int = 0,
        named: Mapping[str, Any] | None = None,
    ) -> Held:
        """The tokens held for `prompt` [P]: none, or what an earlier run made of it, which ends as it began. `sampling` as
        check_sampling has it; `named`: by what of it the request is known, None for all."""
        request = request_digest(prompt, sampling if named is None else named)
        held = Held(prompt, sampling, routed_from)
        earlier = self._earlier.get(request)
        if earlier:
            begun = earlier.popleft()
            before = Held(prompt, begun.sampling or sampling, routed_from)
            before.adopt(_generation(begun))
            held = before if before.count else held
        self._opened.append((request, held))
        return held

    def begun(self) -> list[Begun]:
        """Every generation that holds a token, finished or not, and those of earlier runs that nobody asked for yet."""
        made = [_begun(request, held.generation(), held.sampling) for request, held in self._opened if held.count]
        return made + [one for waiting in self._earlier.values() for one in waiting]


def request_digest(prompt: npt.NDArray[np.int32], sampling: Mapping[str, Any]) -> str:
    """xxh3-128 of a request: its tokens and its sampling parameters."""
    state = xxhash.xxh3_128(np.ascontiguousarray(prompt, dtype="<i4").tobytes())
    state.update(orjson.dumps(dict(sampling), option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
    return state.hexdigest()


def _begun(request: str, generation: Generation, sampling: dict[str, Any]) -> Begun:
    return Begun(
        request=request,
        sampling=sampling,
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        spans=generation.spans,
        finish_reason=generation.finish_reason,
        cached_tokens=generation.cached_tokens,
        prompt_tokens=generation.prompt_tokens,
        started_at=generation.started_at,
        finished_at=generation.finished_at,
        rid=generation.rid,
        flaws=list(generation.flaws),
        conservative=generation.conservative,
        routed_experts=generation.routed_experts,
        routed_from=generation.routed_from,
        kept_tokens=generation.kept_tokens,
    )


def _generation(begun: Begun) -> Generation:
    return Generation(
        token_ids=np.asarray(begun.token_ids, np.int32),
        logprobs=np.asarray(begun.logprobs, np.float32),
        spans=begun.spans,
        finish_reason=begun.finish_reason,
        cached_tokens=begun.cached_tokens,
        prompt_tokens=begun.prompt_tokens,
        started_at=begun.started_at,
        finished_at=begun.finished_at,
        rid=begun.rid,
        flaws=tuple(begun.flaws),
        conservative=begun.conservative,
        routed_experts=begun.routed_experts,
        routed_from=begun.routed_from,
        kept_tokens=begun.kept_tokens,
    )
