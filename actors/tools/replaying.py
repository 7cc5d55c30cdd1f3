"""A second trainer over recorded samples: a new run that holds them and has no source, rollout, engine or reward.

    RUN (log + archive) --export--> file --import--> NEW's SAMPLES --> trainer of NEW (other loss, other K)

On the recorded timeline: a token keeps the number of the version that made it, so with the same batch size its age at a
step, and what the age bound masks, are what they were. The new trainer's own takeovers withdraw nothing, since none of
these tokens was made by its weights.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash
import yaml

from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import RunUnfitError
from physarum.actors.tools.exported import BadLine, Head, Row, read_head, read_rows, refuse_bad
from physarum.actors.tools.importing import Choice, Fed, Relabel, choose, feed
from physarum.actors.tools.new_run import inherit_start_model, made, write_lineage
from physarum.configs.loader import resolve
from physarum.configs.overrides import Override
from physarum.configs.root import RootConfig

_BLOCK_BYTES: Final = 8 << 20
_ROOM: Final = 4
"""The log's share of the store is 5 / 9 of what the queues leave; messages have headers, too."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A new run and what it was filled with."""

    run: str
    folder: str
    parent: str
    fed: Fed
    skipped: list[tuple[int, str]] = []


def replay_config(head: Head, name: str, root: Path, over: Path | None, overrides: Iterable[Override]) -> RootConfig:
    """The recorded run's configuration, `over` and `overrides` above it, reduced to a trainer. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "recorded.yaml"
        base.write_text(head.config)
        top = Path(folder) / "replay.yaml"
        layers = [str(base), *([str(over.absolute())] if over is not None else [])]
        top.write_text(yaml.safe_dump({"extends": layers, "run": {"name": name, "root": str(root.absolute())}}))
        config = resolve(top, list(overrides))
    if config.policies:
        raise RunUnfitError(
            f"the samples are of {', '.join((config.model.name, *config.policies))}; expected those of one policy: each trainer"
            " of that run read its own of them, which one alone does not. Start a new run"
        )
    return reduced(config)


def reduced(config: RootConfig) -> RootConfig:
    """Without anything that makes samples. What only recorded is trained whatever its age: it has one version."""
    age: dict[str, Any] = {"consumption": "train"} if config.trainer.record_only else {}
    return config.model_copy(
        update={
            "machines": {},
            "engines": {},
            "evaluation": None,
            "rollout": config.rollout.model_copy(update={"count": 0}),
            "reward": config.reward.model_copy(update={"count": 0}),
            "trainer": config.trainer.model_copy(update={"record_only": False}),
            "age": config.age.model_copy(update=age),
            "samples": config.samples.model_copy(update={"recorded": True}),
        }
    )


async def make_from_file(
    path: Path, config: RootConfig, parent: OpenRun | None = None, *, skip_bad: bool = False
) -> Made:
    """A new run of `config` whose sample log holds the file's executions. Raises BadLinesError, RunUnfitError.

    `parent`: the run that the file was exported from for this, whose start model it then begins with.
    """
    head = await asyncio.to_thread(read_head, path)
    choice, bad = await asyncio.to_thread(lambda: checked(path, skip_bad=skip_bad))
    config = await asyncio.to_thread(with_room, config, path)
    async with made(config, "import" if parent is None else "replay") as run:
        relabel = Relabel(head.forks, own_history=False)
        await feed(run, good_rows(path), choice, config.source.name, relabel, head.run, rename=False)
        facts = {"first": head.first, "last": head.last, **msgspec.structs.asdict(choice.fed)}
        write_lineage(run, "import" if parent is None else "replay", head.run, facts)
        if parent is not None and parent.config.model == config.model:
            inherit_start_model(parent.folder, run.folder)
    return Made(run=config.run.name, folder=str(config.run.folder), parent=head.run, fed=choice.fed, skipped=list(bad))


async def add_to(run: OpenRun, path: Path, *, skip_bad: bool = False) -> Made:
    """Adds the file's executions to a run, as a source named by the file's content. Raises RunUnfitError for a finished one."""
    if run.finished:
        raise RunUnfitError(
            f"run {run.name} is finished: nothing would train what is added; import with --run NAME instead"
        )
    head = await asyncio.to_thread(read_head, path)
    choice, bad = await asyncio.to_thread(lambda: checked(path, skip_bad=skip_bad))
    source = f"import-{await asyncio.to_thread(_file_digest, path)}"
    relabel = Relabel(head.forks, own_history=True)
    await feed(run, good_rows(path), choice, source, relabel, head.run, rename=True)
    return Made(run=run.name, folder=str(run.folder.path), parent=head.run, fed=choice.fed, skipped=list(bad))


def checked(path: Path, *, skip_bad: bool) -> tuple[Choice, list[BadLine]]:
    """Reads the whole file once before anything is written. Raises BadLinesError naming the lines."""
    bad: list[BadLine] = []
    choice = choose(_sorted_out(path, bad))
    if not skip_bad:
        refuse_bad(path, bad)
    return choice, bad


def good_rows(path: Path) -> Iterator[Row]:
    """The file's executions; what is none was named before."""
    return (row for row in read_rows(path) if isinstance(row, Row))


def with_room(config: RootConfig, path: Path) -> RootConfig:
    """With a store in which the file's samples fit."""
    needed = 2 * config.bus.tasks_max_bytes + _ROOM * path.stat().st_size
    if needed <= config.bus.max_store_bytes:
        return config
    return config.model_copy(update={"bus": config.bus.model_copy(update={"max_store_bytes": needed})})


def _file_digest(path: Path) -> str:
    """Enough of it to tell files apart: the same file imported again is the same source."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()[:8]


def _sorted_out(path: Path, bad: list[BadLine]) -> Iterator[Row]:
    for row in read_rows(path):
        if isinstance(row, BadLine):
            bad.append(row)
        else:
            yield row
