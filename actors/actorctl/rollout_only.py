"""`actorctl rollout-only`: records samples of the start model and trains nothing."""

from __future__ import annotations

from typing import Final

from physarum.actors.actorctl import exits
from physarum.actors.actorctl.ledger import refuse_open
from physarum.actors.actorctl.machine import chosen, run_part
from physarum.actors.actorctl.options import Config, Json, Machine, Settings, Verbose
from physarum.actors.actorctl.up import run_to_end
from physarum.configs.loader import resolve
from physarum.configs.machines import HEAD
from physarum.configs.overrides import Override, parse_command_line

AHEAD: Final = Override(("bus", "tasks_max_bytes"), 4 << 20)
"""Only the size of TASKS bounds how far the source runs ahead: thousands of tasks are enough. A setting goes over it."""
RECORDING: Final = (Override(("trainer", "record_only"), True), Override(("age", "admission"), "free"))
"""What makes a configuration a recording: no trainer, and no count of what a trainer would dispose of."""


def rollout_only(
    config: Config,
    settings: Settings = None,
    machine: Machine = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Record samples without training: engines serve the start model, until stop.samples, stop.steps (batches), stop.time_s
    or the end of the data. `actorctl replay` trains on them later, `actorctl export` writes them to a file."""
    with exits.reported(verbose):
        found = resolve(config, [AHEAD, *parse_command_line(settings or []), *RECORDING])
        if (here := chosen(found, machine)) != HEAD:
            run_part(found, here, as_json, verbose)
            return
        refuse_open(run_to_end(found, as_json, verbose)["account"])
