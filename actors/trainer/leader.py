"""The trainer of the run's own policy, as those of the further policies see it: it says when the run ends.

`stop:` counts its steps. Once it is done, the others train the full batches that they have, and, where the source has
issued all it ever will, everything of that; then they end, too. Invariant: what they wait for is finite, because nothing is
issued any more (admission waits for a trainer that is done as for any other).
"""

from __future__ import annotations

from collections.abc import Callable

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.states import TrainerDone
from physarum.actors.waiting import anything, until


class Leader:
    """`on_done` is called when it is done."""

    def __init__(self, context: Context, on_done: Callable[[], None]) -> None:
        self._context, self._on_done = context, on_done
        self.done: TrainerDone | None = None

    @property
    def is_us(self) -> bool:
        """Whether this is the trainer that leads."""
        return not self._context.policy

    async def follow(self) -> None:
        """Until it is done."""
        if self.is_us:
            return
        self.done = await until(self._context.run_register(TrainerDone), anything, states.TRAINER_DONE)
        self._on_done()

    @property
    def permits_exhaustion(self) -> bool:
        """Whether what is not under way now will never be: only the leader asks for anything again."""
        return self.is_us or self.done is not None
