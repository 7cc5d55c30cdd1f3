"""The start model: from a folder, a hub, a factory hook or the run of another configuration, linked as `start_model`.

Invariant: `runs/NAME/start_model` is absent or leads to a whole Hugging Face folder, and a run that was continued keeps
the one it began with.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec
import xxhash

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.errors import StartModelError
from physarum.actors.supervisor.model_cache import CacheEntry, cached, in_daemon_thread
from physarum.actors.supervisor.run_folder import write_atomic
from physarum.actors.supervisor.stop import StopRequest
from physarum.configs.hooks import Hook
from physarum.configs.loader import digest, resolve
from physarum.configs.model import FactoryConfig, HubConfig
from physarum.configs.origin import dotted
from physarum.configs.root import RootConfig
from physarum.configs.rows import RowsConfig
from physarum.configs.run import RunConfig

_FACTORY_TIMEOUT_S: Final = 3600.0
_ERROR_LINES: Final = 12
_RUN_NAME_LENGTH: Final = 32


class StartModel(msgspec.Struct, frozen=True):
    """`start_model.json`: where the model came from. `seconds` is null where nothing was made."""

    origin: Literal["path", "hub", "factory", "made_by", "head"]
    folder: str
    seconds: float | None = None
    cached: bool = False


class Reporter(Protocol):
    """Tells the user what is being done."""

    def say(self, text: str) -> None: ...

    def progress(self, what: str, done_bytes: int, total_bytes: int) -> None: ...


TrainRun = Callable[[RootConfig], Awaitable[Path]]
"""Runs a configuration to its end and returns the folder of the model that it made."""


async def link_start_model(
    config: RootConfig, folder: RunFolder, stop: StopRequest, train: TrainRun, reporter: Reporter
) -> StartModel:
    """Makes a policy's start model when needed and links it; `config` and `folder` as it has them.

    Raises StartModelError, HubError or InterruptedRunError."""
    record = folder.start_model_record
    if (folder.start_model / "config.json").is_file() and record.is_file():
        return msgspec.json.decode(record.read_bytes(), type=StartModel)
    made = await _make(config, stop, train, reporter)
    if not (Path(made.folder) / "config.json").is_file():
        raise StartModelError(
            f"the start model ({made.origin}) has no config.json in {made.folder}; expected a Hugging Face folder."
            f" Remedy: correct {dotted((*config.under, 'model', made.origin))}, or what it names"
        )
    return link(folder, made)


def link(folder: RunFolder, made: StartModel) -> StartModel:
    """Has `start_model` lead to a model, and records where that came from."""
    aside = folder.own / ".start_model.new"
    aside.unlink(missing_ok=True)
    aside.symlink_to(made.folder, target_is_directory=True)
    os.replace(aside, folder.start_model)
    write_atomic(folder.start_model_record, msgspec.json.encode(made))
    return made


def read_start_model(folder: RunFolder) -> StartModel | None:
    """What `link_start_model` recorded, if it got that far."""
    try:
        return msgspec.json.decode(folder.start_model_record.read_bytes(), type=StartModel)
    except FileNotFoundError:
        return None


async def _make(config: RootConfig, stop: StopRequest, train: TrainRun, reporter: Reporter) -> StartModel:
    model = config.model
    if model.path is not None:
        return StartModel("path", str(model.path))
    if model.hub is not None:
        return StartModel("hub", str(await stop.guard(_fetch(model.hub, reporter))))
    if model.factory is not None:
        entry = await stop.guard(_from_factory(model.factory, reporter))
        return StartModel("factory", str(entry.folder), entry.seconds, entry.cached)
    assert model.made_by is not None  # the schema requires exactly one origin
    entry = await _from_run(resolve(model.made_by), config.run, train, reporter)
    return StartModel("made_by", str(entry.folder), entry.seconds, entry.cached)


async def _fetch(hub: HubConfig, reporter: Reporter) -> Path:
    loop = asyncio.get_running_loop()

    def progress(done: int, total: int) -> None:
        loop.call_soon_threadsafe(reporter.progress, hub.id, done, total)

    from physarum.configs.model_source import fetch_hub  # the hub's library, only where a hub is asked

    return await in_daemon_thread(lambda: fetch_hub(hub, progress))


async def _from_factory(factory: FactoryConfig, reporter: Reporter) -> CacheEntry:
    async def make(folder: Path) -> None:
        reporter.say(f"making the start model by {factory.hook}")
        await _run_factory(factory, folder)

    key = xxhash.xxh3_128(json.dumps(factory.model_dump(mode="json"), sort_keys=True).encode())
    key.update(sources_digest([factory.hook]))
    return await cached(key.hexdigest(), str(factory.hook), make, reporter.say)


async def _run_factory(factory: FactoryConfig, folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "physarum.actors.supervisor.factory_child"),
        *(factory.hook, str(folder), json.dumps(factory.args)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_FACTORY_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        raise StartModelError(f"model.factory {factory.hook} did not end within {_FACTORY_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = "\n".join(f"    {line}" for line in errors.decode(errors="replace").splitlines()[-_ERROR_LINES:])
        raise StartModelError(
            f"model.factory {factory.hook} ended with status {process.returncode}; expected a model in its folder."
            f" Its last lines:\n{lines}\nRemedy: correct the hook, or model.factory.args"
        )


async def _from_run(maker: RootConfig, run: RunConfig, train: TrainRun, reporter: Reporter) -> CacheEntry:
    key = run_digest(maker)
    name = f"{maker.run.name[: _RUN_NAME_LENGTH - 9].rstrip('-')}-{key[:8]}"
    nested = maker.model_copy(update={"run": maker.run.model_copy(update={"name": name, "root": run.root})})

    async def make(folder: Path) -> None:
        reporter.say(f"making the start model by the run {name} ({maker.trainer.objective})")
        result = await train(nested)
        await asyncio.to_thread(shutil.copytree, result, folder, dirs_exist_ok=True)

    return await cached(key, f"the run {name}", make, reporter.say)


def run_digest(config: RootConfig) -> str:
    """Of what decides the model that a run makes: its configuration (less its name and place) and its hooks' sources."""
    anonymous = config.model_copy(update={"run": RunConfig(name="run", root=Path("/"), seed=config.run.seed)})
    key = xxhash.xxh3_128(digest(anonymous).encode())
    key.update(sources_digest(_hooks(config)))
    return key.hexdigest()


def sources_digest(hooks: Iterable[Hook]) -> bytes:
    """Of the Python files that `hooks` live in: a hook's own file, or every module of its package."""
    key = xxhash.xxh3_128()
    for path in sorted({path for hook in hooks for path in _sources(hook)}):
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return key.digest()


def _hooks(config: RootConfig) -> list[Hook]:
    named = [*(_hook_of(part) for _, part in config.source.parts()), config.rollout.generate, config.reward.hook]
    named.append(config.reward.custom_rm)
    if config.evaluation is not None:
        named += [_hook_of(part) for _, part in config.evaluation.parts()]
    if config.reward.group is not None:
        named.append(config.reward.group.hook)
    if config.model.factory is not None:
        named.append(config.model.factory.hook)
    return [hook for hook in named if hook is not None]


def _hook_of(part: RowsConfig) -> Hook | None:
    found = part.row_hook()
    return None if found is None else found[0]


def _sources(hook: Hook) -> Iterable[Path]:
    if hook.is_file:
        return [Path(hook.source)]
    try:
        spec = importlib.util.find_spec(hook.source)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise StartModelError(
            f"hook {hook}: found no module {hook.source}; expected one that can be imported. Remedy: correct the name,"
            " install it, or set PYTHONPATH"
        )
    module = Path(spec.origin)
    in_package = "." in hook.source or module.name == "__init__.py"
    return sorted(module.parent.glob("**/*.py")) if in_package else [module]
