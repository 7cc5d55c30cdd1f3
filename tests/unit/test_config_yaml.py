"""YAML is read as the JSON data that was meant, with the line of each key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from physarum.configs.errors import ConfigError
from physarum.configs.yaml_file import parse_value, read_yaml, write_yaml

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Control characters and the line separators of YAML 1.1 are not printable text.
    | st.text(st.characters(min_codepoint=32, max_codepoint=126)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abz_-1", min_size=1), inner, max_size=3),
    max_leaves=8,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "a.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_yaml(write(folder, text))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("0o17", 15),
        ("0x1F", 31),
        ("012", 12),
        ("yes", "yes"),
        ("off", "off"),
        ("22:30", "22:30"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        (".inf", ".inf"),
        ("~", None),
        ("", None),
        ("True", True),
        ('"1e-4"', "1e-4"),
        ("[0, 1]", [0, 1]),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read = parse_value(text, "command line")
    assert read == value
    assert type(read) is type(value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(JSON)
def test_what_is_written_is_read_back(tmp_path: Path, value: object) -> None:
    text = write_yaml({"extra": value})
    assert read_yaml(write(tmp_path, text)).values == {"extra": value}


def test_each_key_remembers_its_line(tmp_path: Path) -> None:
    layer = read_yaml(write(tmp_path, "run:\n  name: a\n\nstop:\n  ids:\n  - 3\n  - 4\n"))
    lines = {key: origin.line for key, origin in layer.origins.items()}
    assert lines == {
        (): 1,
        ("run",): 1,
        ("run", "name"): 2,
        ("stop",): 4,
        ("stop", "ids"): 5,
        ("stop", "ids", 0): 6,
        ("stop", "ids", 1): 7,
    }


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path, "# nothing\n")).values == {}


def test_a_syntax_error_names_line_and_column(tmp_path: Path) -> None:
    assert "a.yaml:2:5: found mapping values are not allowed here" in refusal(tmp_path, "run: a\nb: c: d\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run:\n  seed: 1\n  seed: 2\n", ("a.yaml:3", "`run.seed` a second time", "line 2")),
        ("1: a\n", ("a.yaml:1", "the key '1'", "quote it")),
        ("a: &x\n  b: 1\nc:\n  <<: *x\n", ("a.yaml:4", "merge key", "extends")),
        ("a: !!python/object:os.system x\n", ("a.yaml:1", "tag", "remove the tag")),
        ("a: &x [*x]\n", ("a.yaml:1", "alias", "without cycles")),
        ("- 1\n", ("a list at the top level", "a mapping of sections")),
        ("a: 99999999999999999999999\n", ("64 bits",)),
        ("a: 1e999\n", ("a finite number",)),
        ("a: 1\n--- \nb: 2\n", ("a.yaml:2",)),
        ("a: \x07\n", ("printable text",)),
    ],
)
def test_what_would_be_read_otherwise_than_meant_is_refused(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    message = refusal(tmp_path, text)
    assert all(word in message for word in words), message


def test_missing_and_undecodable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: found no readable file \(No such file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"run: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 at offset 5"):
        read_yaml(tmp_path / "b.yaml")
