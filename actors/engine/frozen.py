"""A frozen model (judge, reference) is the same bytes on every host of its group, and after every restart.

The first engine of a group records what its folder holds; one that joins with anything else ends before it takes traffic.
"""

from __future__ import annotations

import asyncio
import mmap
from pathlib import Path
from typing import Final

import msgspec

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.errors import UnrecoverableError
from physarum.bus.errors import WrongSequenceError
from physarum.bus.register import Register
from physarum.weightsync.digest import digest_of
from physarum.weightsync.parallel import spread

_WEIGHTS: Final = ".safetensors"
_KINDS: Final = (_WEIGHTS, ".json", ".jinja", ".txt", ".model")
"""What decides what a model answers: weights, configuration, tokenizer, chat template."""


class FrozenFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The digest of each file by name, and the engine that recorded them."""

    files: dict[str, str]
    engine: str

    @property
    def digest(self) -> str:
        """Of all of them."""
        return digest_of(msgspec.msgpack.encode(sorted(self.files.items())))


async def check_frozen(context: Context, group: str, folder: Path) -> str:
    """The digest of the model in `folder`. Raises UnrecoverableError where another engine of the group has other bytes."""
    own = FrozenFiles(files=await asyncio.to_thread(_files, folder), engine=context.identity.instance)
    register = Register(context.bus, context.publisher, "weights", FrozenFiles)
    while True:
        entry = await register.get(states.FROZEN, group)
        if entry.value is not None:
            _compare(group, folder, own, entry.value)
            return own.digest
        try:
            await register.compare_and_set(own, entry.revision, states.FROZEN, group)
        except WrongSequenceError:
            continue  # another engine was first
        return own.digest


async def check_reader(context: Context, group: str, folder: Path) -> None:
    """For who only renders texts for a frozen model: tokenizer, template and configuration in `folder` are its engines', as far
    as one recorded them. Raises UnrecoverableError where they are not."""
    if not await asyncio.to_thread(folder.is_dir):
        raise UnrecoverableError(
            f"engines.{group}.model: {folder} is not there; expected its tokenizer, chat template and configuration also where"
            " its texts are rendered. Copy the folder to this host; the weights may stay away"
        )
    register = Register(context.bus, context.publisher, "weights", FrozenFiles)
    found = (await register.get(states.FROZEN, group)).value
    if found is None:  # none has joined yet
        return
    kinds = tuple(kind for kind in _KINDS if kind != _WEIGHTS)
    own = FrozenFiles(files=await asyncio.to_thread(_files, folder, kinds), engine=context.identity.instance)
    read = {name: digest for name, digest in found.files.items() if not name.endswith(_WEIGHTS)}
    _compare(group, folder, own, FrozenFiles(files=read, engine=found.engine))


async def check_same(group: str, folder: Path, served: Path, url: str) -> None:
    """Raises UnrecoverableError where the server at `url` has other files in `served` than `folder` has."""
    if await asyncio.to_thread(served.samefile, folder):
        return
    own, theirs = await asyncio.gather(*(asyncio.to_thread(_files, one) for one in (folder, served)))
    _compare(group, folder, FrozenFiles(files=own, engine=""), FrozenFiles(files=theirs, engine=f"{url} (of {served})"))


def _files(folder: Path, kinds: tuple[str, ...] = _KINDS) -> dict[str, str]:
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in kinds)
    return dict(zip((path.name for path in paths), spread(_digest, paths), strict=True))


def _digest(path: Path) -> str:
    if path.stat().st_size == 0:
        return digest_of(b"")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        view = memoryview(memory)
        try:
            return digest_of(view)
        finally:
            view.release()


def _compare(group: str, folder: Path, own: FrozenFiles, first: FrozenFiles) -> None:
    names = sorted(own.files.keys() | first.files.keys())
    differing = [name for name in names if own.files.get(name) != first.files.get(name)]
    if differing:
        name = differing[0]
        raise UnrecoverableError(
            f"engines.{group}.model: {folder} is not the model that {first.engine} serves: {len(differing)} files differ, first"
            f" {name}: found {own.files.get(name, 'none')}, expected {first.files.get(name, 'none')}. A frozen model stays as"
            " it is for a whole run: copy the same folder to every host, or use another group name for another model"
        )
