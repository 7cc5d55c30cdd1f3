"""A frozen model that somebody else serves is the model that the configuration names, as far as its server tells.

Its own host sees all files. From elsewhere the server tells its architecture, and how its tokenizer cuts a text: another
tokenizer, or another kind of model, ends the engine before it takes traffic; other weights of the same kind are not seen.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from physarum.actors.context import Context
from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.errors import EngineAnswerError, EngineRefusedError
from physarum.actors.engine.frozen import check_frozen, check_same
from physarum.actors.errors import UnrecoverableError
from physarum.agents.errors import TokenizerError
from physarum.agents.tokenizer import FolderTokenizer

_log = logging.getLogger(__name__)

PROBE: Final = "Compare 1,024 and 3.14: naïve façade, 東京 🙂\n\tdef f(x):  return x**2  # <think> 'tis </think>\n"
"""Digits, blanks, accents, other scripts, an emoji, code and tags: where tokenizers differ."""


async def check_attached(context: Context, group: str, folder: Path, control: EngineControl) -> str:
    """The digest of `folder`, which is what the server at `control` serves. Raises UnrecoverableError where it is not."""
    info = await control.model_info()
    await asyncio.to_thread(_check_kind, group, folder, control.base_url, info)
    served = info.get("model_path")
    if served and _is_here(context, control.base_url) and await asyncio.to_thread(Path(served).is_dir):
        await check_same(group, folder, Path(served), control.base_url)
    else:
        await _check_tokens(group, folder, control)
    return await check_frozen(context, group, folder)


def _check_kind(group: str, folder: Path, url: str, info: dict[str, Any]) -> None:
    file = folder / "config.json"
    own = orjson.loads(file.read_bytes()).get("architectures") if file.is_file() else None
    found = info.get("architectures")
    if own and found and own != found:
        raise UnrecoverableError(
            f"engines.{group}.url: {url} serves {', '.join(found)} (of {info.get('model_path')}); expected {', '.join(own)}, as"
            f" in engines.{group}.model: {folder}. Correct one of them"
        )


def _is_here(context: Context, url: str) -> bool:
    """Whether paths that the server names are this host's."""
    host = urlsplit(url).hostname or ""
    if host in ("localhost", context.host, context.address):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _check_tokens(group: str, folder: Path, control: EngineControl) -> None:
    try:
        own = await asyncio.to_thread(FolderTokenizer(folder).encode, PROBE)
        found = await control.tokens_of(PROBE)
    except (EngineRefusedError, EngineAnswerError, TokenizerError) as error:
        _log.warning("engines.%s: tokenizers of %s and %s are not compared: %s", group, control.base_url, folder, error)
        return
    if own != found:
        raise UnrecoverableError(
            f"engines.{group}.url: the tokenizer of {control.base_url} cuts a text into {len(found)} tokens {found[:8]}...;"
            f" expected {len(own)} tokens {own[:8]}..., as the one in engines.{group}.model: {folder}. Correct one of them"
        )
