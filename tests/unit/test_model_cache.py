"""The cache of models: what a killed process left of one does not fill the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.actors.supervisor.model_cache import cache_root, cached


async def test_what_a_killed_process_left_of_a_model_goes_when_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start that was killed while it fetched left as much of the model as it had, for ever."""
    monkeypatch.setenv("PHYSARUM_CACHE", str(tmp_path))
    left, others = cache_root() / ".abc-killed" / "model", cache_root() / ".def-at-work"
    for folder in (left, others):
        folder.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(100))

    async def make(target: Path) -> None:
        (target / "config.json").write_text("{}")

    entry = await cached("abc", "a model", make, lambda text: None)
    assert (entry.folder / "config.json").read_text() == "{}"
    assert sorted(path.name for path in cache_root().iterdir()) == [".def-at-work", "abc", "abc.lock"]
