"""Several policies in one episode: `client.of("solver")` is the same client on that policy's engines.

Invariant: the views of a task share its clock, its token budget, its journal and its environments; of its own each policy has
engines, tokenizer, session, seeds, what its engines report, and, where the configuration says so, its sampling. A request is
known to the journal with its policy: an interrupted task never hands one policy's tokens to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from physarum.agents.errors import AgentError
from physarum.agents.protocols import Tokenizer
from physarum.agents.routing import Router
from physarum.agents.session import EngineChoices
from physarum.configs.suggest import nearest

ClientT = TypeVar("ClientT")


class NoPolicyError(AgentError):
    """An episode asked for a policy that the run does not train."""


class PolicyParts(NamedTuple):
    """`sampling`: the policy's own, which takes the place of the task's; None: it has the task's."""

    router: Router
    tokenizer: Tokenizer
    choices: EngineChoices
    sampling: Mapping[str, Any] | None


class Policies(Generic[ClientT]):
    """`own`: the name of the run's own policy, whose client a task begins with; `parts`: of each further one."""

    def __init__(self, own: str = "", parts: Mapping[str, PolicyParts] | None = None) -> None:
        self._own, self._parts = own, parts or {}
        self._views: dict[str, ClientT] = {}

    def for_task(self, first: ClientT) -> Policies[ClientT]:
        """The views of one task. `first`: of the run's own policy."""
        made = Policies[ClientT](self._own, self._parts)
        made._views[self._own] = first
        return made

    def view(self, name: str, asked: ClientT, make: Callable[[ClientT, str, PolicyParts], ClientT]) -> ClientT:
        """The view of a policy, made once from that of the run's own (outside a task from `asked`). Raises NoPolicyError."""
        if name in self._views:
            return self._views[name]
        if name not in self._parts:
            known = [one for one in (self._own, *self._parts) if one]
            near = nearest(name, known)
            hint = f"did you mean {near!r}" if near is not None else f"there are: {', '.join(known) or 'none by name'}"
            raise NoPolicyError(
                f"the run trains no policy {name!r}; expected `model.name` or a name under `policies`; {hint}"
            )
        self._views[name] = make(self._views.get(self._own, asked), name, self._parts[name])
        return self._views[name]
