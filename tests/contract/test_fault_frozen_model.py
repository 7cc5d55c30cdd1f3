"""A judge that is another model on another host, or after a restart, is refused at its join by the file that differs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from actor_fixture import make_context

from physarum.actors.engine.frozen import check_frozen, check_reader
from physarum.actors.errors import UnrecoverableError
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher


def model(folder: Path, weights: bytes = b"w" * 5000, **files: str) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").write_text("")
    (folder / "README.md").write_text(str(folder))
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


async def test_the_same_bytes_join_whoever_is_first(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    contexts = [make_context(tmp_path, bus, publisher, "engine") for _ in range(4)]
    folders = [model(tmp_path / f"host-{k}") for k in range(4)]
    pairs = zip(contexts, folders, strict=True)
    found = await asyncio.gather(*(check_frozen(context, "judge", folder) for context, folder in pairs))
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"weights": b"w" * 4999 + b"x"}, "model.safetensors"),
        ({"tokenizer": "{}"}, "tokenizer.json: found .*expected none"),
    ],
)
async def test_other_bytes_are_refused_by_the_file(
    tmp_path: Path, bus: Bus, publisher: Publisher, other: dict[str, object], named: str
) -> None:
    context = make_context(tmp_path, bus, publisher, "engine")
    await check_frozen(context, "judge", model(tmp_path / "first"))
    second = model(tmp_path / "second", **other)  # type: ignore[arg-type]
    with pytest.raises(UnrecoverableError, match=rf"engines\.judge\.model: .*1 files differ, first {named}"):
        await check_frozen(context, "judge", second)
    await check_frozen(context, "reference", second)  # another group, another model


async def test_who_renders_for_a_frozen_model_needs_its_tokenizer_and_not_its_weights(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = make_context(tmp_path, bus, publisher, "reward")
    first = model(tmp_path / "first", tokenizer="{}")
    await check_reader(context, "judge", tmp_path / "first")  # nothing is recorded yet
    await check_frozen(context, "judge", first)
    bare = model(tmp_path / "bare", tokenizer="{}")
    (bare / "model.safetensors").unlink()
    await check_reader(context, "judge", bare)
    with pytest.raises(UnrecoverableError, match=r"1 files differ, first tokenizer.json"):
        await check_reader(context, "judge", model(tmp_path / "other", tokenizer="{ }"))
