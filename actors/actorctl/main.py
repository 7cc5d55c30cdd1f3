"""`actorctl`: the commands and their options. What they do is in the modules beside this one."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Annotated, Final, Optional

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.table import Table

import physarum
from physarum.actors.actorctl import down as down_command
from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl import ledger as ledger_command
from physarum.actors.actorctl import logs as logs_command
from physarum.actors.actorctl import ps as ps_command
from physarum.actors.actorctl import up as up_command
from physarum.actors.actorctl.checkpoints import app as checkpoints_app
from physarum.actors.actorctl.dead import app as dead_app
from physarum.actors.actorctl.eval import evaluate
from physarum.actors.actorctl.evals import evals
from physarum.actors.actorctl.export import export
from physarum.actors.actorctl.fork import fork
from physarum.actors.actorctl.import_ import import_file
from physarum.actors.actorctl.import_slime import import_slime
from physarum.actors.actorctl.ledger import refuse_open
from physarum.actors.actorctl.ledger_text import sample_text, step_text, version_text
from physarum.actors.actorctl.logs_elsewhere import elsewhere
from physarum.actors.actorctl.machine import chosen, run_part
from physarum.actors.actorctl.options import (
    SETTINGS,
    Config,
    Json,
    Machine,
    Policy,
    Root,
    Settings,
    Target,
    Verbose,
    print_json,
    say,
)
from physarum.actors.actorctl.replay import replay
from physarum.actors.actorctl.rollout_only import rollout_only
from physarum.actors.actorctl.sampling import sampling
from physarum.actors.actorctl.scale import cordon, drain, scale, uncordon
from physarum.actors.actorctl.tasks import app as tasks_app
from physarum.actors.actorctl.weights import app as weights_app
from physarum.actors.argument_check import run_check
from physarum.actors.preflight import check as check_config
from physarum.configs.errors import errors_in
from physarum.configs.loader import resolve
from physarum.configs.machines import HEAD
from physarum.configs.overrides import parse_command_line

_PIPE_COLUMNS: Final = 300

app = typer.Typer(
    help="Runs physarum's actors: fully asynchronous RL post-training of LLMs.",
    epilog=exits.HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(dead_app, name="dead")
app.add_typer(tasks_app, name="tasks")
app.add_typer(checkpoints_app, name="checkpoints")
app.add_typer(weights_app, name="weights")
for _name, _command in (
    ("eval", evaluate),
    ("evals", evals),
    ("rollout-only", rollout_only),
    ("replay", replay),
    ("fork", fork),
    ("export", export),
    ("import", import_file),
    ("import-slime", import_slime),
):
    app.command(_name, context_settings=SETTINGS, epilog=exits.HELP)(_command)

for _plain in (scale, drain, cordon, uncordon, sampling):
    app.command(epilog=exits.HELP)(_plain)

_PACKAGES: Final = ("torch", "megatron-core", "nats-py", "transformers")


@app.command(context_settings=SETTINGS, epilog=exits.HELP)
def up(
    config: Config,
    settings: Settings = None,
    machine: Machine = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the actors are started.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
    ready_fd: Annotated[int | None, typer.Option("--ready-fd", hidden=True)] = None,
) -> None:
    """Start a run (or continue, or adopt it) and supervise it to its end. Ctrl-C drains; twice stops at once.

    A run that is finished already is not started again: its summary is shown, with status 0.
    """
    with exits.reported(verbose):
        found = resolve(config, parse_command_line(settings or []))
        here = chosen(found, machine)
        if detach:
            raise typer.Exit(up_command.check_and_detach(found, as_json, here))
        if here != HEAD:
            run_part(found, here, as_json, verbose, ready_fd)
            return
        summary = up_command.run_to_end(found, as_json, verbose, ready_fd)
        for one in (summary, *summary.get("policies", {}).values()):
            refuse_open(one["account"])


@app.command(context_settings=SETTINGS, epilog=exits.HELP)
def down(
    name: Annotated[Optional[str], typer.Argument(metavar="[NAME|CONFIG]")] = None,  # noqa: UP045
    settings: Settings = None,
    now: Annotated[bool, typer.Option("--now", help="Do not drain: kill.")] = False,
    machine: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--machine", help="End one machine's part only; the run goes on."),
    ] = None,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Drain and stop a run (without a name: the one that is live). It can be continued with `up`."""
    with exits.reported(verbose):
        folder = target.find_only(name, root, settings or [])
        if folder is None:
            say({"run": None}, "nothing is running", as_json)
            return
        if machine is not None and machine != HEAD:
            uvloop.run(down_command.stop_machine(folder, machine, now))
            say({"run": folder.run, "machine": machine}, f"machine {machine} of run {folder.run} is stopped", as_json)
            return
        stopped = uvloop.run(down_command.stop_run(folder, now))
        found = {
            "run": stopped.run,
            "supervisor": stopped.supervisor,
            "actors": list(stopped.actors),
            "bus": stopped.bus,
        }
        say(found, f"run {stopped.run} is stopped ({len(stopped.actors)} actors)", as_json)


@app.command(context_settings=SETTINGS, epilog=exits.HELP)
def ps(
    name: Target, settings: Settings = None, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """List a run's actors: role, instance, pid, state, uptime, restarts, devices, event-loop lag, numbers."""
    with exits.reported(verbose):
        state = uvloop.run(ps_command.look(target.find_part(name, root, settings or [])))
        if as_json:
            print_json(state)
        else:
            ps_command.show(state, wide_console())


@app.command(epilog=exits.HELP)
def logs(
    name: Target,
    instance: Annotated[Optional[str], typer.Argument(help="One actor, for example rollout-0.")] = None,  # noqa: UP045
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 20,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show the last lines of the actors' logs, of this machine or of one actor of any. With --json one object {instance, text}
    on each line."""
    with exits.reported(verbose):
        folder = target.find_part(name, root)
        if not logs_command.is_here(folder, instance) and target.recorded_config(folder).machines:
            if follow:
                raise typer.BadParameter(f"--follow reads a file: run it on the machine of {instance} (actorctl ps)")
            found = uvloop.run(elsewhere(folder, instance, lines))
            logs_command.show(found, as_json, prefixed=False)
            return
        files = logs_command.log_files(folder, instance)
        logs_command.show(logs_command.read(files, lines, follow), as_json, prefixed=instance is None)


@app.command(context_settings=SETTINGS, epilog=exits.HELP)
def check(
    config: Config,
    settings: Settings = None,
    machine: Machine = None,
    arguments: Annotated[
        bool, typer.Option("--arguments", help="Ask the installed SGLang which arguments it takes: seconds.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Validate a configuration, its hooks, files, ports, devices and disk, without starting anything."""
    with exits.reported(verbose):
        found = resolve(config, parse_command_line(settings or []))
        problems = [*check_config(found, chosen(found, machine)), *(run_check(found) if arguments else ())]
        fields = ("severity", "where", "found", "expected", "remedy")
        rows = [{name: str(getattr(problem, name)) for name in fields} for problem in problems]
        if as_json:
            print_json({"problems": rows})
        elif not rows:
            say({}, f"{config}: no problem found", as_json)
        else:
            _print_problems(fields, rows)
        if errors_in(problems):
            raise typer.Exit(exits.USAGE)


@app.command(context_settings=SETTINGS, epilog=exits.HELP)
def ledger(
    name: Target,
    settings: Settings = None,
    step: Annotated[Optional[int], typer.Option("--step", min=0, help="What made step N.")] = None,  # noqa: UP045
    sample: Annotated[Optional[str], typer.Option("--sample", help="Where this task or execution is.")] = None,  # noqa: UP045
    of: Annotated[Optional[str], typer.Option("--version", help="What this version took part in.")] = None,  # noqa: UP045
    policy: Policy = None,
    recount: Annotated[bool, typer.Option("--recount", help="Count a finished run's store again.")] = False,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print the account: issued = trained + masked + dropped + dead + in flight. Status 1 when it does not close.

    With --step, --sample or --version: what the run knows of that.
    """
    with exits.reported(verbose):
        if sum(one is not None for one in (step, sample, of)) > 1:
            raise typer.BadParameter("give one of --step, --sample and --version")
        folder = target.find(name, root, settings or [])
        if step is not None:
            steps = uvloop.run(ledger_command.step_of(folder, step, policy))
            say({"step": step, "steps": steps}, step_text(steps), as_json)
        elif sample is not None:
            view = uvloop.run(ledger_command.sample_of(folder, sample, policy))
            say(msgspec.structs.asdict(view), sample_text(view), as_json)
        elif of is not None:
            seen = uvloop.run(ledger_command.version_of(folder, of))
            say(msgspec.structs.asdict(seen), version_text(seen), as_json)
        else:
            found = uvloop.run(ledger_command.account_of(folder, recount))
            say(found, ledger_command.account_text(found), as_json)
            refuse_open(found)


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version, and those of the main packages."""
    found = {"physarum": physarum.__version__, **{name: _installed(name) for name in _PACKAGES}}
    say(found, "\n".join(f"{name} {number or 'not installed'}" for name, number in found.items()), as_json)


def main() -> None:
    """Entry point. Hooks may live in the working directory, as they may for the actors."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    app()


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def wide_console() -> Console:
    """Where no terminal says how wide it is, nothing is cut off: what reads a pipe wants whole lines."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS
    return console


def _print_problems(fields: tuple[str, ...], rows: list[dict[str, str]]) -> None:
    console = Console()
    if not console.is_terminal:
        for row in rows:
            typer.echo(f"{row['severity']}: {row['where']}: found {row['found']}; expected {row['expected']}."
                       f" Remedy: {row['remedy']}.")  # fmt: skip
        return
    table = Table(show_lines=True)
    for name in fields:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


if __name__ == "__main__":
    main()
