"""A checkpoint in an object store is whole or does not count, whichever write fails and however; nothing foreign is touched."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from failing_store import Death, FailingFileSystem

from physarum.actors.mirror import copying, store
from physarum.actors.mirror.errors import MirrorError, MirrorUnfitError
from physarum.actors.mirror.process import answered
from physarum.actors.mirror.records import Copied, Copy, Failed, Fetch, Named, Retain, Retained, Survey, Surveyed
from physarum.actors.mirror.store import Store
from physarum.actors.trainer.checkpoints import CheckpointMeta, Checkpoints
from physarum.actors.trainer.cursor import Cursor
from physarum.actors.trainer.digests import DIGESTS

Made = tuple[Named, Path]


@pytest.fixture(params=["memory", "failing", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/mirror/run" if request.param == "file" else f"{request.param}://{uuid.uuid4().hex}/run"


@pytest.fixture
def failing() -> Iterator[str]:
    yield f"failing://{uuid.uuid4().hex}/run"
    FailingFileSystem.arm(None)


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BLOCK_BYTES", 400)  # several blocks of a file
        patch.setattr(store, "BLOCK_BYTES", 300)
        yield


def write(folder: Path, number: int, content: bytes = b"") -> Made:
    checkpoints = Checkpoints(folder)
    aside = checkpoints.aside(1)
    (aside / "rank0.safetensors").write_bytes(content or bytes([number]) * 1000)
    (aside / ".metadata").write_bytes(b"")
    meta = CheckpointMeta(epoch=1, number=number, steps=number, trained_s=1.0, cursor=Cursor("created").record())
    digest, made = checkpoints.commit(aside, meta, f"1.{number}")
    return Named(made.name, digest), made


def still() -> None:
    """Nobody counts what moves."""


def copy(url: str, made: Made) -> Any:
    return answered(Copy(url=url, folder=str(made[1]), checkpoint=made[0]), still)


def retain(url: str, keep: int, *known: Named, candidates: list[Named] | None = None) -> Any:
    named = list(known) if candidates is None else candidates
    return answered(Retain(url=url, candidates=named, known=list(known), keep=keep), still)


def whole(url: str, *names: Named) -> list[Named]:
    found = answered(Survey(url, list(names)), still)
    assert isinstance(found, Surveyed)
    return found.whole


def assert_true(url: str, *names: Named) -> list[Named]:
    """Whatever counts there can be read byte for byte."""
    there = whole(url, *names)
    assert [copying.fault(Store(url), one, still) for one in there] == ["" for _ in there]
    return there


def test_a_checkpoint_comes_back_as_it_was(url: str, tmp_path: Path) -> None:
    made = write(tmp_path / "checkpoints", 1)
    assert whole(url, made[0]) == []
    sent = copy(url, made)
    assert sent == Copied(sum(file.stat().st_size for file in made[1].iterdir()))
    assert assert_true(url, made[0]) == [made[0]]
    assert copy(url, made) == Copied(0)  # it was there
    back = Checkpoints(tmp_path / "elsewhere")
    aside = back.restoring(made[0].name)
    assert copying.fetch(Store(url), made[0], aside, still) == sent.size_bytes
    folder = back.place(aside, made[0].name)
    assert back.load(*[made[0].name, made[0].digest])[0] == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        file.name: file.read_bytes() for file in made[1].iterdir()
    }


@pytest.mark.parametrize("error", [OSError, Death])
def test_whichever_write_fails_a_checkpoint_is_there_whole_or_does_not_count(
    failing: str, tmp_path: Path, error: type[BaseException]
) -> None:
    """Two are kept, so with the third the first goes: every write and every removal fails once."""
    first, second, third = (write(tmp_path, number) for number in (1, 2, 3))
    names = [one[0] for one in (first, second, third)]
    for fails_at in itertools.count():
        url = f"{failing}{fails_at}"
        FailingFileSystem.arm(None)
        copy(url, first)
        copy(url, second)
        FailingFileSystem.arm(fails_at, error)
        try:
            answers = [copy(url, third), retain(url, 2, *names)]
        except Death:
            answers = []
        if not any(isinstance(answer, Failed) for answer in answers) and answers:
            break
        assert not any(isinstance(answer, Failed) and answer.unfit for answer in answers)
        assert second[0] in assert_true(url, *names), fails_at
        FailingFileSystem.arm(None)  # the next try mends it, and leaves nothing behind
        assert isinstance(copy(url, third), Copied)
        assert isinstance(retain(url, 2, *names), Retained)
        assert assert_true(url, *names) == names[1:]
        assert Store(url).keys() == {one.key for one in names[1:]}
    assert answers[1] == Retained([first[0].key])
    assert (
        fails_at == 3 + 1 + 1 + 1 + 3
    )  # 3 blocks of the rank, meta; digests; digests removed, and the 3 other objects


def test_one_that_is_written_again_under_its_name_does_not_mix_with_the_first(failing: str, tmp_path: Path) -> None:
    """Other bytes of one name: the first stays until the second is whole."""
    first = write(tmp_path, 1)
    copy(failing, first)
    again = write(tmp_path, 1, b"other" * 300)
    assert again[0].name == first[0].name
    FailingFileSystem.arm(1)
    assert isinstance(copy(failing, again), Failed)
    assert assert_true(failing, first[0], again[0]) == [first[0]]
    FailingFileSystem.arm(None)
    copy(failing, again)
    assert retain(failing, 9, first[0], again[0], candidates=[again[0]]) == Retained([first[0].key])
    assert assert_true(failing, first[0], again[0]) == [again[0]]


def test_only_what_the_ledger_names_is_let_go_and_what_was_withdrawn_goes_first(url: str, tmp_path: Path) -> None:
    """Another run of the same name, or a later trainer, has checkpoints there that this one knows nothing of."""
    foreign = write(tmp_path / "other", 1, b"of another run")
    good, withdrawn, new = (write(tmp_path / "this", number) for number in (1, 2, 3))
    for one in (foreign, good, withdrawn, new):
        copy(url, one)
    answer = retain(url, 2, good[0], withdrawn[0], new[0], candidates=[good[0], new[0]])
    assert answer == Retained([withdrawn[0].key])
    names = [foreign[0], good[0], withdrawn[0], new[0]]
    assert assert_true(url, *names) == [foreign[0], good[0], new[0]]


def test_a_half_copied_one_is_not_counted_among_those_that_are_kept(failing: str, tmp_path: Path) -> None:
    first, broken, third = (write(tmp_path, number) for number in (1, 2, 3))
    copy(failing, first)
    FailingFileSystem.arm(4)
    copy(failing, broken)
    FailingFileSystem.arm(None)
    copy(failing, third)
    assert retain(failing, 2, first[0], broken[0], third[0]) == Retained([broken[0].key])
    assert Store(failing).keys() == {first[0].key, third[0].key}


@pytest.mark.parametrize("damage", ["altered", "missing", "digests"])
def test_damage_there_is_named_and_never_brought_back(url: str, tmp_path: Path, damage: str) -> None:
    made = write(tmp_path / "checkpoints", 1)
    copy(url, made)
    system, root = store.client(url)
    path = f"{root}/{made[0].key}/rank0.safetensors"
    if damage == "altered":
        system.pipe_file(path, b"\1" * 999 + b"\2")
    elif damage == "missing":
        system.rm_file(path)
    else:
        system.pipe_file(f"{root}/{made[0].key}/{DIGESTS}", b"\x81\xa5files\x80")
    expected = {"altered": "has digest", "missing": "is missing", "digests": "not there, or not whole"}[damage]
    assert expected in copying.fault(Store(url), made[0], still)
    aside = Checkpoints(tmp_path / "elsewhere").restoring(made[0].name)
    answer = answered(Fetch(url, made[0], str(aside)), still)
    assert isinstance(answer, Failed) and answer.unfit and expected in answer.reason
    assert not (aside / DIGESTS).exists()


def test_an_altered_checkpoint_on_disk_is_not_passed_on(url: str, tmp_path: Path) -> None:
    made = write(tmp_path / "checkpoints", 1)
    (made[1] / "rank0.safetensors").write_bytes(b"\2" * 1000)
    answer = copy(url, made)
    assert isinstance(answer, Failed) and "rank0.safetensors has digest" in answer.reason
    assert whole(url, made[0]) == []
    wrong = (Named(made[0].name, "0" * 32), made[1])
    assert "the ledger says 00000000" in copy(url, wrong).reason


def test_a_store_that_keeps_less_than_it_took_is_not_believed(failing: str, tmp_path: Path) -> None:
    made = write(tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FailingFileSystem, "info", lambda self, path, **options: {"size": 7, "name": path})
        answer = copy(failing, made)
    assert isinstance(answer, Failed) and "has 7 bytes" in answer.reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FailingFileSystem, "pipe_file", lambda self, path, value, **options: None)
        answer = copy(failing, made)
    assert isinstance(answer, Failed) and "gives back something else" in answer.reason
    assert whole(failing, made[0]) == []


def test_a_scheme_that_is_not_installed_names_the_extra(tmp_path: Path) -> None:
    fsspec.register_implementation("absent", "no_such_package.FileSystem", errtxt="Install no_such_package")
    for scheme in ("absent", "nowhere"):
        answer = copy(f"{scheme}://bucket/run", write(tmp_path, 1))
        assert isinstance(answer, Failed) and answer.unfit
        assert f"no implementation of {scheme}://" in answer.reason and "physarum[objects]" in answer.reason
    with pytest.raises(MirrorUnfitError):
        Store("nowhere://bucket")


def test_errors_of_a_client_are_told_with_their_url(failing: str, tmp_path: Path) -> None:
    FailingFileSystem.arm(0, PermissionError)
    answer = copy(failing, write(tmp_path, 1))
    assert answer == Failed(f"{failing}: PermissionError: ", unfit=False)
    assert issubclass(MirrorError, Exception) and not issubclass(MirrorError, MirrorUnfitError)


def test_second_names_outlive_the_checkpoint(tmp_path: Path) -> None:
    """Retention may let a checkpoint go, or the trainer write it again, while it is being copied."""
    checkpoints = Checkpoints(tmp_path)
    name, folder = write(tmp_path, 1)
    linked = checkpoints.linked(name.name)
    again, _ = write(tmp_path, 1, b"other" * 300)
    checkpoints.retain([])
    assert not folder.exists() and again != name
    assert copying.copy(Store(f"memory://{uuid.uuid4().hex}"), linked, name, still) > 1000
    assert checkpoints.restoring("1.9").is_dir()
    with pytest.raises(FileNotFoundError):
        checkpoints.linked("1.9")
    checkpoints.clear_leftovers()
    assert list(tmp_path.iterdir()) == []
