"""A folder that a tool makes is there whole or not at all, and what is in its way stays."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from physarum.actors.tools.errors import ConversionError
from physarum.actors.tools.new_folder import new_folder


def test_it_appears_when_the_block_ends_well_and_not_before(tmp_path: Path) -> None:
    out, stale = tmp_path / "deep" / "out", tmp_path / "deep" / ".out-writing"
    stale.mkdir(parents=True)
    (stale / "old").write_text("of one that died")
    with new_folder(out, ConversionError) as aside:
        assert not (aside / "old").exists() and not out.exists()
        (aside / "new").write_text("x")
    assert [path.name for path in out.iterdir()] == ["new"] and not stale.exists()


@pytest.mark.parametrize("error", [ValueError("broken"), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_is_left_of_one_that_failed_and_its_error_is_told_as_it_is(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, new_folder(tmp_path / "out", ConversionError):
        raise error
    assert raised.value is error and list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_stays_and_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConversionError, match="out exists; expected a new folder"),
        new_folder(tmp_path / "out", ConversionError),
    ):
        pytest.fail("it is there")
    inside = tmp_path / "file" / "out"
    with pytest.raises(ConversionError, match="nothing was made in .*file"), new_folder(inside, ConversionError):
        pytest.fail("it cannot be")
    with pytest.raises(ConversionError, match="nothing was made"), new_folder(tmp_path / "new", ConversionError):
        raise FileNotFoundError(2, "No such file", "weights")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]
