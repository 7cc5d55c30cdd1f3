"""One exception per meaning; every message says what was found, what was expected and the remedy."""

from __future__ import annotations


class SupervisorError(Exception):
    """Base of what the supervisor raises on purpose."""


class RunHeldError(SupervisorError):
    """Another supervisor holds this run."""


class RunDiffersError(SupervisorError):
    """The run's folder was made by another configuration."""


class RunFinishedError(SupervisorError):
    """The run has its summary already; there is nothing to do."""


class NotRunningError(SupervisorError):
    """No such run, or nothing of it is running here."""


class ActorFailedError(SupervisorError):
    """An actor (or the embedded bus) cannot be kept running; the message names it and shows its last lines."""


class DiskFullError(SupervisorError):
    """A file of the run cannot be written for want of room."""


class VersionError(SupervisorError):
    """The run's folder was written by another version of physarum."""


class StartModelError(SupervisorError):
    """The start model could not be made."""


class RunUnfinishedError(SupervisorError):
    """The tool that made the run was ended in the middle: it does not hold all that it should."""


class HeadAbsentError(SupervisorError):
    """The head of the run did not open it in time."""


class HeadEndedError(SupervisorError):
    """The run failed at its head, or the head was away for too long."""


class MachineRefusedError(SupervisorError):
    """This machine cannot be a part of the head's run: another configuration, or an address that others do not reach."""


class MachineHeldError(SupervisorError):
    """Another host is this machine of the run."""


class InterruptedRunError(SupervisorError):
    """The user asked to stop before the run was finished."""
