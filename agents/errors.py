"""One exception per meaning; every message says what was found, what was expected and the remedy."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from physarum.agents.protocols import Generation


class AgentError(Exception):
    """Base of everything that episodes raise on purpose."""


class TemplateUnreadableError(AgentError):
    """This host has not the chat template that a task asks for; another one may."""


class EngineError(AgentError):
    """Base of what can go wrong between a client and an engine."""


class EngineRefusedError(EngineError):
    """The engine answered 4xx (or a redirect): the request itself is wrong, and sending it again would not help."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(
            f"engine {url} refused the request with HTTP {status}: {body}; expected 200."
            " The request is not retried: correct the sampling parameters or the prompt's length"
        )
        self.url, self.status, self.body = url, status, body


class EngineFailedError(EngineError):
    """The engine answered 5xx: its fault, not the request's. The client retries it."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"engine {url} failed with HTTP {status}: {body}; expected 200")
        self.url, self.status, self.body = url, status, body


def refusal(url: str, status: int, body: str) -> EngineFailedError | EngineRefusedError:
    """What an answer of this status means."""
    failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return EngineFailedError(url, status, body) if failed else EngineRefusedError(url, status, body)


class EngineReplyError(EngineError):
    """HTTP 200 whose body is not a reply of /generate: an incompatible server, or not an engine at all."""


class BrokenOffError(EngineError):
    """The chunks of a streamed answer ended in order, but before the last one: an engine, or a router before it, let go."""


class OffPinError(EngineError):
    """Tokens of other weights than the task is pinned to (ordered mode); they are thrown away and made again."""


class NoEngineError(EngineError):
    """A router found no engine within its deadline."""


class EngineUnavailableError(EngineError):
    """No engine finished the request within the deadline or the allowed attempts.

    `partial` holds the tokens that engines had already made (finish_reason "abort"), so that the caller may continue
    the trajectory later; None when there are none.
    """

    def __init__(self, message: str, partial: Generation | None) -> None:
        super().__init__(message)
        self.partial = partial


class SamplingError(AgentError, ValueError):
    """Sampling parameters that a token-exact client cannot honour."""


class TaskError(AgentError, ValueError):
    """The task itself cannot be run, now or later: it is buried at its first try, and not asked for again."""


class PromptTooLongError(TaskError):
    """A prompt that leaves no room for an answer."""


class TrajectoryError(AgentError, ValueError):
    """Tokens that may not be appended: unequal lengths, or spans that do not cover them."""


class EnvironmentTimeoutError(AgentError):
    """An environment did not answer a step within its deadline."""


class DemonstrationError(AgentError, ValueError):
    """A demonstration without prompt, without trained tokens, or with a malformed segment."""


class ProblemSpaceError(AgentError, ValueError):
    """A range of operands that cannot hold the problems asked for."""


class TokenizerError(AgentError):
    """A model folder without a tokenizer that can be used without loading transformers."""
