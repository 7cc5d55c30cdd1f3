"""Exit statuses, and how an exception becomes one clear message and a status.

Invariant: an error that we raise on purpose is one message without a traceback (with it under -v); an error that we do
not know is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Final

import typer

from physarum.actors.errors import ActorError
from physarum.actors.supervisor.errors import (
    DiskFullError,
    HeadAbsentError,
    InterruptedRunError,
    MachineHeldError,
    MachineRefusedError,
    NotRunningError,
    RunDiffersError,
    RunHeldError,
    RunUnfinishedError,
    SupervisorError,
    VersionError,
)
from physarum.actors.tools.errors import BadLinesError, NotInRunError, RunUnfitError, ToolError
from physarum.bus import room
from physarum.bus.errors import BusError, BusUnreachableError
from physarum.configs.errors import ConfigError, PhysarumConfigError

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_RUNNING: Final = 3
BUS_UNREACHABLE: Final = 4
NOT_IN_RUN: Final = 5
INTERRUPTED: Final = 130

HELP: Final = """
Exit status: 0 done; 1 the run failed, or its account does not close; 2 wrong usage or configuration; 3 no such run, or
not running; 4 the bus cannot be reached; 5 the run has no such step, sample, version, dead letter or checkpoint; 130
stopped by the user before the end.
"""

_KNOWN: Final = (PhysarumConfigError, SupervisorError, BusError, ActorError, ToolError)


@contextlib.contextmanager
def reported(verbose: bool) -> Iterator[None]:
    """Ends the command with the right status when the block raises."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except _KNOWN as error:
        _show(error, verbose)
        raise typer.Exit(status_of(error)) from None
    except OSError as error:
        if not room.is_full(error):
            raise
        _show(DiskFullError(_full_message(error)), verbose)
        raise typer.Exit(FAILED) from None


def _full_message(error: OSError) -> str:
    return (
        f"{error.filename or 'a file of the run'} cannot be written: {error.strerror or error}; expected room on its disk."
        " Nothing that was accepted is lost: free space there, then start the same configuration again"
    )


def status_of(error: BaseException) -> int:
    match error:
        case InterruptedRunError():
            return INTERRUPTED
        case NotRunningError() | HeadAbsentError():
            return NOT_RUNNING
        case MachineHeldError() | MachineRefusedError():
            return USAGE
        case RunHeldError() | RunDiffersError() | RunUnfinishedError() | VersionError():
            return USAGE
        case PhysarumConfigError() | RunUnfitError() | BadLinesError():
            return USAGE
        case NotInRunError():
            return NOT_IN_RUN
        case BusUnreachableError():
            return BUS_UNREACHABLE
        case _:
            return FAILED


def _show(error: Exception, verbose: bool) -> None:
    if verbose:
        traceback.print_exception(error)
    if isinstance(error, InterruptedRunError):
        sys.stderr.write(f"{error}\n")
    elif isinstance(error, ConfigError):
        sys.stderr.writelines(f"error: {problem}\n" for problem in error.problems)
    else:
        sys.stderr.write(f"error: {error}\n")
