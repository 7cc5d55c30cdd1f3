"""Which arguments the *installed* SGLang (or its router) takes, asked of the engine's own Python and remembered per release.

Invariant: the schema comes from the server's own parser, never from a list of ours, so it cannot go out of date. Asking
imports SGLang (seconds); the answer is kept in a file keyed by interpreter and release, and asked again when either is
another.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from physarum.actors.engine.environment import installed_in
from physarum.actors.engine.errors import EngineInspectionError

DEFAULT_TIMEOUT_S: Final = 120.0

_VERSION_TIMEOUT_S: Final = 20.0

_VERSION_SCRIPT: Final = "import importlib.metadata as m; print(m.version({package!r}))"
_MARK: Final = "physarum-schema:"
_SCHEMA_SCRIPT: Final = f"""
import argparse, inspect, json
from {{module}} import {{parser}}
parser = argparse.ArgumentParser()
{{parser}}.add_cli_args(parser)
found = []
for action in parser._actions:
    flags = [flag for flag in action.option_strings if flag.startswith("--")]
    if not flags or action.dest == "help":
        continue
    number = action.nargs if action.nargs in ("+", "*", "?") else 1 if action.nargs is None else int(action.nargs)
    choices = [str(choice) for choice in action.choices] if action.choices else None
    found.append(dict(flags=flags, number=number, choices=choices))
try:
    from sglang.srt.sampling.sampling_params import SamplingParams
    fields = getattr(SamplingParams, "__struct_fields__", None) or list(inspect.signature(SamplingParams).parameters)
except ImportError:
    fields = []
print({_MARK!r} + json.dumps(dict(arguments=found, sampling=list(fields))))
"""


class Program(NamedTuple):
    """What is asked about: its distribution, and the class that adds its arguments to a parser."""

    package: str
    module: str
    parser: str

    @property
    def version_script(self) -> str:
        return _VERSION_SCRIPT.format(package=self.package)

    @property
    def schema_script(self) -> str:
        return _SCHEMA_SCRIPT.format(module=self.module, parser=self.parser)


SGLANG: Final = Program("sglang", "sglang.srt.server_args", "ServerArgs")
ROUTER: Final = Program("sglang-router", "sglang_router.router_args", "RouterArgs")


class Argument(msgspec.Struct, frozen=True):
    """One option of the server: `number` of values as argparse has it (0: a switch), all spellings in `flags`."""

    flags: list[str]
    number: int | str
    choices: list[str] | None = None

    @property
    def is_switch(self) -> bool:
        return self.number == 0

    @property
    def negation(self) -> str | None:
        """The spelling that switches off (`--no-NAME`), where the server has one."""
        return next((flag for flag in self.flags if flag.startswith("--no-")), None)


class ServerSchema(msgspec.Struct, frozen=True):
    """What one installed release accepts."""

    version: str
    arguments: list[Argument]
    sampling: list[str] = []
    """Sampling parameters of a request, and some that the server keeps for itself; empty: not known."""

    def by_name(self) -> dict[str, Argument]:
        """Option names without dashes in front, every spelling, to their argument."""
        return {flag.removeprefix("--"): argument for argument in self.arguments for flag in argument.flags}


class _Told(msgspec.Struct):
    arguments: list[Argument]
    sampling: list[str]


async def inspect_server(
    python: Path, environment: Mapping[str, str], cache: Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> ServerSchema:
    """The schema of the SGLang that `python` imports under `environment`. Raises EngineInspectionError."""
    return await inspect_program(SGLANG, python, environment, cache, timeout_s)


def remembered_at(program: Program, python: Path, cache: Path) -> ServerSchema | None:
    """As `remembered_server`, and no process is started: for a Python whose environment can be looked into."""
    version = installed_in(python, program.package)
    return _remembered(_cache_file(cache, python, version, program)) if version else None


async def remembered_server(python: Path, environment: Mapping[str, str], cache: Path) -> ServerSchema | None:
    """The schema of the SGLang that `python` has, where an engine was started with it; None: nobody asked it here yet, or it
    cannot be run. Imports nothing of it."""
    try:
        version = (await _ask(SGLANG.package, python, SGLANG.version_script, environment, _VERSION_TIMEOUT_S)).strip()
    except EngineInspectionError:
        return None
    return _remembered(_cache_file(cache, python, version, SGLANG))


async def inspect_program(
    program: Program,
    python: Path,
    environment: Mapping[str, str],
    cache: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ServerSchema:
    """The same, of another program."""
    package = program.package

    async def ask(script: str) -> str:
        return await _ask(package, python, script, environment, timeout_s)

    version = (await ask(program.version_script)).strip()
    file = _cache_file(cache or default_cache(), python, version, program)
    remembered = _remembered(file)
    if remembered is not None:
        return remembered
    answer = await ask(program.schema_script)
    line = next((line for line in answer.splitlines() if line.startswith(_MARK)), None)
    if line is None:
        raise EngineInspectionError(
            f"{python} printed no argument list for {package} {version}; it printed {answer[-500:]!r}"
        )
    told = msgspec.json.decode(line.removeprefix(_MARK), type=_Told)
    schema = ServerSchema(version, told.arguments, told.sampling)
    _remember(file, schema)
    return schema


def default_cache() -> Path:
    """XDG_CACHE_HOME/physarum, by default ~/.cache/physarum."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "physarum"


def _cache_file(folder: Path, python: Path, version: str, program: Program) -> Path:
    # The path as written, not resolved: the Python of a venv is a link, and the venv decides what is installed.
    key = hashlib.sha256(f"{python.absolute()}\n{version}\n{program.schema_script}".encode()).hexdigest()[:16]
    return folder / f"{program.package}-arguments-{version}-{key}.json"


def _remembered(file: Path) -> ServerSchema | None:
    """An unreadable or altered file counts as absent: it is only a cache and is written anew."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ServerSchema)
    except (OSError, msgspec.DecodeError):
        return None


def _remember(file: Path, schema: ServerSchema) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=file.parent, prefix=".schema-")
    with os.fdopen(descriptor, "wb") as out:
        out.write(msgspec.json.encode(schema))
    os.replace(aside, file)


async def _ask(package: str, python: Path, script: str, environment: Mapping[str, str], timeout_s: float) -> str:
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", script, stdout=pipe, stderr=pipe, env=dict(environment), start_new_session=True
        )
    except OSError as error:
        raise EngineInspectionError(
            f"the engine's Python {python} cannot be run ({error.strerror}); set engines.<group>.python to an"
            f" interpreter that has {package} installed"
        ) from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError as error:
        raise EngineInspectionError(f"{python} did not describe its {package} within {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = "\n".join(err.decode(errors="replace").splitlines()[-5:])
        raise EngineInspectionError(
            f"{python} could not describe its {package} (exit {process.returncode}); install {package} there or set"
            f" engines.<group>.python. Its last lines:\n{last}"
        )
    return out.decode(errors="replace")
