"""What can go wrong with an engine, one exception per meaning."""

from __future__ import annotations

from physarum.actors.errors import UnrecoverableError


class EngineError(Exception):
    """Base of everything the engine role raises on purpose."""


class EngineArgumentError(EngineError, ValueError):
    """An SGLang argument that the installed server does not know, or that physarum sets itself."""


class EngineInspectionError(EngineError):
    """The engine's Python could not be asked which arguments its SGLang takes."""


class EngineDiedError(EngineError):
    """The server process ended when it should not have; its last log lines are in the message."""


class EngineStartTimeoutError(EngineError):
    """The server runs but did not become healthy within its start deadline."""


class EngineUnreachableError(EngineError):
    """No connection to the server, or it broke before the answer was complete."""


class EngineTimeoutError(EngineError):
    """The server did not answer within the deadline; whether the request took effect is unknown."""


class EngineRefusedError(EngineError):
    """The server answered and refused: `status` and `body` are its own words."""

    def __init__(self, message: str, status: int, body: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class EngineAnswerError(EngineError):
    """The server answered with something that its interface does not promise."""


class NothingPassedError(UnrecoverableError):
    """A group's canary refused a version before any other had passed: there is nothing that its engines may serve."""


class EngineCapabilityError(EngineError):
    """What is asked for cannot be done safely by this release of SGLang as it is configured."""
