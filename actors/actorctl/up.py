"""`actorctl up`: check, then supervise the run to its end; or (`--detach`) let a process of its own do that."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import uvloop
from rich.console import Console
from rich.logging import RichHandler

from physarum.actors.actorctl.target import is_live
from physarum.actors.context import RunFolder
from physarum.actors.display.lines import PlainLines
from physarum.actors.display.reporter import LineReporter, TerminalReporter
from physarum.actors.display.result import print_rows, summary_rows
from physarum.actors.display.table import LiveTable
from physarum.actors.model_maker import Reporter
from physarum.actors.preflight import check
from physarum.actors.supervisor import run_folder
from physarum.actors.supervisor.bus_keeper import embedded_server
from physarum.actors.supervisor.errors import RunFinishedError, RunHeldError
from physarum.actors.supervisor.live import Observer
from physarum.actors.supervisor.process import log_tail
from physarum.actors.supervisor.run_lock import held_message, holder
from physarum.actors.supervisor.stop import StopRequest
from physarum.actors.supervisor.supervisor import Supervisor
from physarum.configs.errors import ConfigError, errors_in
from physarum.configs.machines import HEAD
from physarum.configs.root import RootConfig

_LOG_FORMAT: Final = "%(asctime)s supervisor %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True)
class Screen:
    """Where things are shown: with --json only the result goes to stdout."""

    console: Console
    observer_for: Callable[[RootConfig], Observer]
    reporter: Reporter


def screen(as_json: bool) -> Screen:
    """The live table on a terminal, plain lines elsewhere."""
    stream = sys.stderr if as_json else sys.stdout
    console = Console(file=stream)
    if console.is_terminal:
        return Screen(console, lambda config: LiveTable(console, config), TerminalReporter(console))
    return Screen(console, lambda config: PlainLines(stream, config), LineReporter(stream))


def refuse_bad(config: RootConfig, console: Console, machine: str = HEAD) -> None:
    """Shows warnings; raises ConfigError with everything that is known to be wrong before a process starts.

    A run whose actors or bus are still there (they are adopted) was checked when it started, and holds its own ports.
    """
    folder = RunFolder(config.run.folder_on(machine))
    if is_live(folder) or embedded_server(config, folder).running() is not None:
        return
    problems = check(config, machine)
    if errors := errors_in(problems):
        raise ConfigError(errors)
    for problem in problems:
        console.print(f"{problem.severity}: {problem}", markup=False, highlight=False, soft_wrap=True)


def refuse_taken(config: RootConfig, machine: str = HEAD) -> None:
    """Raises before the checks (whose ports the run itself may hold) what the supervisor would raise after them."""
    folder = RunFolder(config.run.folder_on(machine))
    if holder(folder.path) is not None:
        raise RunHeldError(held_message(folder.path))
    run_folder.refuse_unusable(folder, config)


def configure_logging(folder: RunFolder, console: Console, verbose: bool) -> None:
    """Everything to logs/supervisor.log, warnings (all, with -v) to the screen, above the live table."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    logging.raiseExceptions = False  # a full disk must not put tracebacks of the logging itself on the screen
    to_file = logging.FileHandler(folder.logs / "supervisor.log")
    to_file.setFormatter(logging.Formatter(_LOG_FORMAT))
    to_screen: logging.Handler
    if console.is_terminal:
        to_screen = RichHandler(console=console, show_path=False)
    else:
        to_screen = logging.StreamHandler(console.file)
        to_screen.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    to_screen.setLevel(logging.INFO if verbose else logging.WARNING)
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_screen], force=True)


async def supervise(config: RootConfig, shown: Screen, on_started: Callable[[], None]) -> dict[str, Any]:
    """Runs to the end; the summary."""
    stop = StopRequest()
    with stop.on_signals():
        supervisor = Supervisor(config, stop, shown.reporter, shown.observer_for, on_started=on_started)
        return await supervisor.run()


def show_summary(name: str, summary: dict[str, Any], shown: Screen, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(orjson.dumps(summary).decode() + "\n")
    else:
        print_rows(shown.console, summary_rows(name, summary))


def finished_summary(config: RootConfig, error: RunFinishedError) -> dict[str, Any]:
    """The summary of the run that need not be started again."""
    sys.stderr.write(f"{error}\n")
    found: dict[str, Any] = orjson.loads(RunFolder(config.run.folder).summary.read_bytes())
    return found


def announce_ready(handle: int | None) -> Callable[[], None]:
    """Tells the process that waits for `--detach` that the actors are started."""

    def ready() -> None:
        if handle is not None:
            os.write(handle, b"ready\n")
            os.close(handle)

    return ready


def check_and_detach(config: RootConfig, as_json: bool, machine: str = HEAD) -> int:
    """What is wrong is said before a process of its own is started; 0 also for a run that is finished already."""
    try:
        refuse_taken(config, machine)
    except RunFinishedError as error:
        show_summary(config.run.name, finished_summary(config, error), screen(as_json), as_json)
        return 0
    refuse_bad(config, screen(as_json).console, machine)
    return detach(config, machine=machine)


def detach(config: RootConfig, command: Sequence[str] = (), machine: str = HEAD) -> int:
    """Starts the same command without --detach in a session of its own; returns when its actors are started.

    Returns 0, or the status with which it ended before; its last lines are then shown.
    """
    folder = RunFolder(config.run.folder_on(machine))
    folder.logs.mkdir(parents=True, exist_ok=True)
    output = folder.logs / "up.log"
    reader, writer = os.pipe()
    words = [word for word in (command or sys.orig_argv) if word not in ("--detach", "-d")]
    with output.open("ab") as log, open(reader, "rb") as ready:
        start = log.tell()
        child = subprocess.Popen(
            [*words, f"--ready-fd={writer}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        # Ends by "ready", or by the end of the child: the pipe is then closed.
        if ready.readline():
            what = f"run {config.run.name}" + ("" if machine == HEAD else f" on machine {machine}")
            sys.stdout.write(f"{what} is started (supervisor {child.pid}); actorctl ps {config.run.name}\n")
            return 0
    status = child.wait()
    sys.stderr.write(log_tail(Path(output), 40, start) + "\n")
    return status


def run_to_end(config: RootConfig, as_json: bool, verbose: bool, ready_fd: int | None = None) -> dict[str, Any]:
    """Checks, supervises to the end and shows the summary, which it returns; a finished run only shows it."""
    shown = screen(as_json)
    try:
        refuse_taken(config)
        refuse_bad(config, shown.console)
        configure_logging(RunFolder(config.run.folder), shown.console, verbose)
        summary: dict[str, Any] = uvloop.run(supervise(config, shown, announce_ready(ready_fd)))
    except RunFinishedError as error:
        summary = finished_summary(config, error)
    show_summary(config.run.name, summary, shown, as_json)
    return summary
