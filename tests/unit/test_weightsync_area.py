"""Versions in a host's memory: nobody ever reads one file while another version is written over it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from physarum.bus.errors import RecordError
from physarum.weightsync.area import SharedArea
from physarum.weightsync.errors import ManifestError, NoRoomError

LABEL = "policy@1.1"


@pytest.fixture
def area(tmp_path: Path) -> SharedArea:
    return SharedArea(tmp_path)


def held(area: SharedArea, label: str, data: bytes) -> int:
    """The file's inode."""
    filling = area.begin(f"w-{label}")
    filling.write(data, 0)
    filling.finish(len(data))
    assert area.hold(f"w-{label}", label) is not None
    filling.close()
    return area.path(label).stat().st_ino


def read(descriptor: int) -> bytes:
    return os.pread(descriptor, 1 << 20, 0)


def test_the_memory_of_a_version_that_was_given_up_is_used_again(area: SharedArea) -> None:
    first = held(area, LABEL, b"1" * 9)
    area.give_up(LABEL)
    assert held(area, "policy@1.2", b"22") == first
    assert area.path("policy@1.2").read_bytes() == b"22", "the longer version before it is cut off"


def test_a_version_that_somebody_reads_is_never_overwritten(area: SharedArea) -> None:
    first = held(area, LABEL, b"one")
    reader = area.open(LABEL)
    assert reader is not None
    area.give_up(LABEL)
    assert area.open(LABEL) is None
    assert held(area, "policy@1.2", b"two") != first
    assert read(reader) == b"one"
    os.close(reader)


def test_a_spare_that_a_late_reader_has_opened_is_not_taken(area: SharedArea) -> None:
    """It opened the file just before it was given up, and has the lock for a moment."""
    first = held(area, LABEL, b"one")
    late = os.open(area.path(LABEL), os.O_RDONLY)
    area.give_up(LABEL)
    import fcntl

    fcntl.flock(late, fcntl.LOCK_SH)
    assert held(area, "policy@1.2", b"two") != first
    assert read(late) == b"one"
    os.close(late)


def test_a_version_that_a_stopped_process_was_giving_up_is_not_waited_for(area: SharedArea) -> None:
    import fcntl

    held(area, LABEL, b"one")
    stopped = os.open(area.path(LABEL), os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    assert area.open(LABEL) is None
    os.close(stopped)
    reader = area.open(LABEL)
    assert reader is not None and read(reader) == b"one"
    os.close(reader)


def test_readers_and_writers_at_once_see_whole_versions(area: SharedArea) -> None:
    """A reader of whatever is newest always finds one version's bytes, while each version takes the place of an older one."""
    size, torn, stop = 64 << 10, [], threading.Event()
    held(area, "policy@1.0", b"\0" * size)

    def look() -> None:
        while not stop.is_set():
            for label in area.labels():
                descriptor = area.open(label)
                if descriptor is None:
                    continue
                data = os.pread(descriptor, size, 0)
                if data != bytes([int(label.rsplit(".", 1)[1]) % 256]) * size:
                    torn.append(label)
                os.close(descriptor)

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, 200):
        held(area, f"policy@1.{number}", bytes([number % 256]) * size)
        area.give_up(f"policy@1.{number - 1}")
    stop.set()
    for reader in readers:
        reader.join()
    assert not torn


def test_only_the_newest_versions_of_each_model_stay_where_nobody_serves(area: SharedArea) -> None:
    for label in ("policy@1.9", "policy@2.1", "policy@1.10", "judge@1.1"):
        held(area, label, b"x")
    with area.served():
        area.retain(2)
        assert len(area.labels()) == 4, "a checkpoint service says what stays"
    area.retain(2)
    assert sorted(area.labels()) == ["judge@1.1", "policy@1.10", "policy@2.1"]


def test_what_a_dead_writer_left_is_removed_and_nobody_elses(area: SharedArea) -> None:
    area.begin("trainer-policy@1.1").close()
    area.begin("fetch-policy@1.1").close()
    area.clear_filling("trainer-")
    assert [file.name for file in (area.folder / "filling").iterdir()] == ["fetch-policy@1.1"]


def test_what_was_not_filled_here_is_not_held(area: SharedArea) -> None:
    assert area.hold("elsewhere", LABEL) is None
    with pytest.raises(ManifestError, match="is no name of a file"):
        area.hold("../held/policy@1.1.safetensors", LABEL)
    with pytest.raises(RecordError, match="is not MODEL@EPOCH.NUMBER"):
        area.open("../../etc/passwd")


def test_a_full_memory_is_named_with_a_remedy(area: SharedArea, monkeypatch: pytest.MonkeyPatch) -> None:
    filling = area.begin("one")

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoRoomError, match=r"byte 5: No space left on device.*enlarge /dev/shm"):
        filling.write(b"x", 5)
    filling.discard()


def test_the_memory_of_a_run_that_was_deleted_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "here").mkdir()
    gone, here = (SharedArea.of_run(tmp_path / name, 1, 5) for name in ("gone", "here"))
    (tmp_path / "gone").rmdir()
    SharedArea.of_run(tmp_path / "here", 1, 5)
    assert gone.folder.exists(), "somebody is at work there, who may see another disk"
    folder = gone.folder
    del gone
    SharedArea.of_run(tmp_path / "here", 1, 5)
    assert here.folder.exists() and not folder.exists()
    SharedArea.remove_of_run(tmp_path / "here")


def test_two_runs_of_one_name_have_areas_of_their_own(tmp_path: Path) -> None:
    for root in ("a", "b"):
        (tmp_path / root / "run").mkdir(parents=True)
    areas = [SharedArea.of_run(tmp_path / root / "run", 1, 5) for root in ("a", "b")]
    assert areas[0].folder != areas[1].folder
    for root in ("a", "b"):
        SharedArea.remove_of_run(tmp_path / root / "run")
    assert not any(one.folder.exists() for one in areas)
    assert SharedArea.of_run(tmp_path / "large", 1 << 60, 5).folder.is_relative_to(tmp_path), "memory would not do"
