"""A mirror's process: killed in the middle of any write, silent, and what is brought back before a trainer starts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import psutil
import pytest
from actor_fixture import BASE

from physarum.actors.mirror import asking, copying
from physarum.actors.mirror.asking import ask, mirror_url
from physarum.actors.mirror.errors import MirrorError, MirrorUnfitError
from physarum.actors.mirror.records import Copied, Copy, Named, Survey, Surveyed
from physarum.actors.mirror.restoring import restore_missing
from physarum.actors.mirror.store import Store
from physarum.actors.trainer.checkpoints import CheckpointMeta, Checkpoints
from physarum.actors.trainer.cursor import Cursor
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig

LIMIT_S = 60.0
DIES = """
import os, signal, sys
import fsspec
from fsspec.implementations.local import LocalFileSystem
from physarum.actors.mirror import process

class Dying(LocalFileSystem):
    "A real disk; write number DIES_AT leaves half of its bytes there, and the process is no more."
    protocol = "file"
    left = int(sys.argv[1])
    def open(self, path, mode="rb", **options):
        made = super().open(path, mode, **options)
        return Half(made) if mode == "wb" else made
    def pipe_file(self, path, value, **options):
        with self.open(path, "wb") as out:
            out.write(value)

class Half:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *raised): self.file.close()
    def write(self, block):
        Dying.left -= 1
        if Dying.left < 0:
            self.file.write(block[: len(block) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.write(block)

fsspec.register_implementation("file", Dying, clobber=True)
process.main()
"""


@pytest.fixture
def config(tmp_path: Path) -> RootConfig:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(BASE)
    return resolve(recipe, parse_command_line([f"checkpoint.mirror=file://{tmp_path}/mirror/"]))


@pytest.fixture
def url(config: RootConfig) -> str:
    found = mirror_url(config)
    assert found is not None
    return found


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def write(checkpoints: Checkpoints) -> tuple[Named, Path]:
    aside = checkpoints.aside(1)
    (aside / "rank0.safetensors").write_bytes(b"weights" * 1000)
    meta = CheckpointMeta(epoch=1, number=2, steps=2, trained_s=1.0, cursor=Cursor("created").record())
    digest, folder = checkpoints.commit(aside, meta)
    return Named(folder.name, digest), folder


async def test_killed_at_any_write_nothing_counts_and_the_next_copy_mends_it(
    checkpoints: Checkpoints, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder = write(checkpoints)
    copy = Copy(url=url, folder=str(folder), checkpoint=name)
    for dies_at in range(3):  # the state, the meta file, the digests
        with monkeypatch.context() as patch:
            patch.setattr(asking, "COMMAND", (sys.executable, "-c", DIES, str(dies_at)))
            with pytest.raises(MirrorError, match="ended without an answer"):
                await ask(copy, Copied, LIMIT_S)
        assert any(Path(url.removeprefix("file://"), name.key).iterdir())
        assert Store(url).listing(name) is None
    assert (await ask(copy, Copied, LIMIT_S)).size_bytes > 7000
    assert copying.fault(Store(url), name, lambda: None) == ""


async def test_a_silent_store_ends_the_copy_and_its_process(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never says anything, however long one waits."""
    monkeypatch.setattr(asking, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.read()"))
    before = psutil.Process().children()
    with pytest.raises(MirrorError, match=r"silent for 0.2 s; .* raise checkpoint.mirror_timeout_s"):
        await ask(Survey(url, []), Surveyed, 0.2)
    assert psutil.Process().children() == before


async def test_a_missing_checkpoint_is_brought_back_and_a_damaged_one_is_left(
    checkpoints: Checkpoints, url: str, config: RootConfig
) -> None:
    name, folder = write(checkpoints)
    await ask(Copy(url=url, folder=str(folder), checkpoint=name), Copied, LIMIT_S)
    shutil.rmtree(checkpoints.folder)  # another host, or another disk
    await restore_missing(config, checkpoints, name)
    assert checkpoints.load(name.name, name.digest)[1].number == 2
    (folder / "rank0.safetensors").write_bytes(b"other")
    await restore_missing(config, checkpoints, name)
    assert (folder / "rank0.safetensors").read_bytes() == b"other"
    shutil.rmtree(folder)
    with pytest.raises(MirrorUnfitError, match="not there, or not whole"):
        await restore_missing(config, checkpoints, Named(name.name, "0" * 32))
    assert list(checkpoints.folder.iterdir()) == []
