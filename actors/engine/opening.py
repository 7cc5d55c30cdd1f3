"""How an engine that is started here listens to other machines: at this host's address, to requests that carry the run's key.

Invariant: the key is on no command line. SGLang reads it from a file that only this user may read, and that goes as soon as
the server answers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from physarum.actors.context import Context
from physarum.agents.engine_key import engine_key
from physarum.configs.secrets import read_secret

EVERYWHERE: Final = "0.0.0.0"
LOOPBACK: Final = "127.0.0.1"


class Opening(msgspec.Struct, frozen=True):
    """`address`: what is announced; `key`: what requests must carry."""

    address: str
    key: str


def opening(context: Context) -> Opening | None:
    """None: it listens on loopback, and asks for no key; so does every engine of a run on one machine."""
    token = read_secret(context.config.checkpoint.token_env) if context.config.machines else None
    return None if token is None else Opening(context.address, engine_key(token))


def key_file(log_file: Path) -> Path:
    """Beside the server's log, which is its own."""
    return log_file.with_suffix(".key.yaml")


def write_key(path: Path, key: str) -> None:
    """As an argument of SGLang's `--config`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(f'api-key: "{key}"\n')
