"""The entry point of every actor process: `python -m physarum.actors.main RUN_FOLDER ROLE INSTANCE`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from pathlib import Path

import msgspec
import uvloop

from physarum.actors.context import Context, Identity, RunFolder
from physarum.actors.errors import EXIT_FAILED, EXIT_OK, EXIT_UNRECOVERABLE, UnrecoverableError
from physarum.actors.policies import policy_of
from physarum.actors.roles import actor_class
from physarum.actors.runtime import Runtime
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.publisher import Publisher
from physarum.configs.errors import PhysarumConfigError
from physarum.configs.loader import resolve

_log = logging.getLogger("physarum")


def configure_logging(identity: Identity) -> None:
    """Lines on stderr, which the supervisor sends to the actor's log file."""
    logging.basicConfig(
        level=os.environ.get("PHYSARUM_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s {identity.instance} %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


async def run_actor(identity: Identity, folder: RunFolder) -> None:
    """Connects and runs one actor to its end."""
    whole = resolve(folder.config)
    policy = policy_of(whole, identity.role, identity.instance)
    config, folder = whole.of_policy(policy), folder.of_policy(policy)
    endpoint = msgspec.json.decode(folder.endpoint.read_bytes(), type=Endpoint)
    bus = await Bus.connect(endpoint, identity.run, identity.instance, deadline_s=config.bus.start_timeout_s)
    try:
        publisher = await Publisher(bus).start()
        context = Context(identity, config, folder, endpoint, bus, publisher)
        # Imported beside the loop: the trainer's torch and Megatron take seconds.
        kind = await asyncio.to_thread(actor_class, identity.role)
        await Runtime(kind(context)).main()
    finally:
        await bus.close()


def main(arguments: list[str]) -> int:
    """Returns the exit status; the log's last lines name what ended the actor."""
    folder, role, instance = arguments
    identity = Identity(RunFolder(Path(folder)).run, role, instance)
    configure_logging(identity)
    try:
        uvloop.run(run_actor(identity, RunFolder(Path(folder))))
    except (UnrecoverableError, PhysarumConfigError) as error:
        _log.error("%s cannot run: %s", identity, error)
        return EXIT_UNRECOVERABLE
    except KeyboardInterrupt:
        return EXIT_OK
    except BaseExceptionGroup as group:
        for error in _leaves(group):
            _log.error("%s failed: %s: %s", identity, type(error).__name__, error)
        _log.debug("%s", "".join(traceback.format_exception(group)))
        return _status(_leaves(group))
    except Exception as error:  # noqa: BLE001 - the end of the process: named in its log, told by its status
        _log.exception("%s failed: %s: %s", identity, type(error).__name__, error)
        return EXIT_FAILED
    return EXIT_OK


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves


def _status(errors: list[BaseException]) -> int:
    fatal = any(isinstance(error, (UnrecoverableError, PhysarumConfigError)) for error in errors)
    return EXIT_UNRECOVERABLE if fatal else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
