"""Versions out of an object store for servers that others run: pulled, told of, and followed. No run and no bus is needed.

An object store tells nobody of what is new, so who follows looks at an interval: one listing each time.
Invariant: whatever is told of a version is told again until it took it, also after this process was started anew.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Final

import msgspec

from physarum.actors.tools.errors import NotInRunError, ToolError
from physarum.bus.errors import RecordError
from physarum.configs.secrets import read_secret, url_holds_credentials
from physarum.weightsync.errors import ObjectAbsentError, WeightSyncError
from physarum.weightsync.mirror.apart import BucketApart
from physarum.weightsync.mirror.pulling import Pulled, pull
from physarum.weightsync.mirror.reading import Mirror

_log = logging.getLogger(__name__)

_TOLD: Final = ".told"
_ANSWER_BYTES: Final = 500


class PullError(ToolError):
    """A version could not be pulled, or whoever was told of it did not take it."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be pulled, and where to. `then`: an address that is POSTed {"model_path", "weight_version"}, or a command with
    PHYSARUM_FOLDER and PHYSARUM_VERSION in its environment. `timeout_s`: for each answer of the store."""

    url: str
    folder: Path
    run: str | None = None
    label: str | None = None
    keep: int = 2
    key_env: str | None = None
    timeout_s: float = 60.0
    then: str | None = None
    then_timeout_s: float = 600.0


def once(asked: Asked) -> Pulled:
    """Raises PullError, NotInRunError."""
    with _mirror(asked) as mirror:
        return _pulled(mirror, asked)


def follow(asked: Asked, every_s: float, on_pulled: Callable[[Pulled], None], sleep: Callable[[float], None]) -> None:
    """For ever, or until `sleep` raises: what fails is logged, and tried again at the next look; `on_pulled` hears of news."""
    pulled = None
    with _mirror(asked) as mirror:
        while True:
            try:
                pulled = _pulled(mirror, asked, pulled)
                if pulled.new:
                    on_pulled(pulled)
            except ToolError as error:
                _log.error("%s; trying again in %g s", error, every_s)
            sleep(every_s)


@contextmanager
def _mirror(asked: Asked) -> Iterator[Mirror]:
    if "://" not in asked.url or url_holds_credentials(asked.url):
        raise PullError(
            f"found {asked.url.rpartition('@')[2]!r}; expected the URL of checkpoint.versions.mirror without user or password,"
            " for example s3://bucket/prefix. Credentials come from the environment, where the store's client looks"
        )
    parts = [asked.url.rstrip("/"), *([asked.run] if asked.run else []), "weights"]
    with closing(BucketApart("/".join(parts), asked.timeout_s)) as bucket:
        yield Mirror(bucket, read_secret(asked.key_env))


def _pulled(mirror: Mirror, asked: Asked, known: Pulled | None = None) -> Pulled:
    try:
        pulled = pull(mirror, asked.folder, asked.label, asked.keep, known)
    except ObjectAbsentError as error:
        raise NotInRunError(str(error)) from error
    except (WeightSyncError, RecordError) as error:
        raise PullError(str(error)) from error
    if asked.then is not None and not _was_told(asked, pulled):
        _tell(asked.then, pulled, asked.then_timeout_s)
        _told(asked).write_text(f"{pulled.label}\n{asked.then}\n")
    return pulled


def _told(asked: Asked) -> Path:
    return asked.folder / _TOLD


def _was_told(asked: Asked, pulled: Pulled) -> bool:
    try:
        return _told(asked).read_text() == f"{pulled.label}\n{asked.then}\n"
    except FileNotFoundError:
        return False


def _tell(then: str, pulled: Pulled, timeout_s: float) -> None:
    """Raises PullError unless it answers 2xx, or ends with status 0, in time."""
    folder = str(Path(pulled.folder).resolve())
    if then.startswith(("http://", "https://")):
        _post(then, {"model_path": folder, "weight_version": pulled.label}, timeout_s)
        return
    try:
        environment = {**os.environ, "PHYSARUM_FOLDER": folder, "PHYSARUM_VERSION": pulled.label}
        subprocess.run(shlex.split(then), check=True, timeout=timeout_s, env=environment)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise PullError(f"{pulled.label} is pulled, and {then!r} failed: {error}") from error


def _post(url: str, body: dict[str, str], timeout_s: float) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            response.read(_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        text = error.read(_ANSWER_BYTES).decode(errors="replace")
        raise PullError(f"{body['weight_version']} is pulled, and {url} answered {error.code}: {text}") from error
    except (OSError, HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise PullError(f"{body['weight_version']} is pulled, and {url} did not take it: {reason}") from error
