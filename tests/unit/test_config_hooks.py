"""A hook that cannot be imported or called is refused with the place of the fault."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from physarum.configs.errors import HookError
from physarum.configs.hooks import Hook, check_async, check_rows, check_signature, load_hook


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "config_hook_good.py").write_text("class Box:\n    @staticmethod\n    def score(execution): return 1\n")
    (tmp_path / "config_hook_raises.py").write_text("\n\nraise RuntimeError('no licence')\n")
    (tmp_path / "config_hook_syntax.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "config_hook_needs.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "config_hook_exits.py").write_text("raise SystemExit(3)\n")
    return tmp_path


@pytest.mark.parametrize("text", ["a", "a:", ":b", "a:b:c", "a b:c", "a.:b", "./x.txt:f"])
def test_a_malformed_name_is_refused(text: str) -> None:
    with pytest.raises(HookError, match="malformed name; expected `package.module:attribute`"):
        Hook(text)


def test_a_name_has_two_parts() -> None:
    hook = Hook("a.b:C.d")
    assert (hook.source, hook.attribute, hook.is_file) == ("a.b", "C.d", False)
    assert hook.anchored(Path("/x")) == "a.b:C.d"
    assert Hook("../r.py:f").anchored(Path("/x/y")) == "/x/r.py:f"


def test_modules_and_files_are_loaded(modules: Path) -> None:
    loaded = load_hook("config_hook_good:Box.score")
    assert callable(loaded)
    assert loaded(None) == 1
    from_file = f"{modules}/config_hook_good.py:Box"
    assert load_hook(from_file) is load_hook(from_file)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("config_hook_absent:f", ["no module `config_hook_absent`", "set PYTHONPATH"]),
        ("config_hook_good.inner:f", ["no module `config_hook_good.inner`"]),
        ("config_hook_good:Bix", ["no `Bix` in config_hook_good", "did you mean `Box`"]),
        ("config_hook_good:Box.scare", ["no `scare` in config_hook_good:Box", "did you mean `score`"]),
        ("config_hook_raises:f", ["RuntimeError at ", "config_hook_raises.py:3: no licence"]),
        ("config_hook_syntax:f", ["SyntaxError at ", "config_hook_syntax.py:2"]),
        ("config_hook_needs:f", ["ModuleNotFoundError at ", "config_hook_needs.py:1", "nowhere_to_be_found"]),
        ("config_hook_exits:f", ["SystemExit at ", "config_hook_exits.py:1"]),
    ],
)
def test_a_failed_import_names_its_place(modules: Path, hook: str, words: list[str]) -> None:
    with pytest.raises(HookError) as caught:
        load_hook(hook)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_file_that_raises_or_is_missing_is_named(modules: Path) -> None:
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(HookError, match=r"config_hook_raises\.py:3: no licence"):
            load_hook(f"{modules}/config_hook_raises.py:f")
    with pytest.raises(HookError, match=r"no file .*absent\.py"):
        load_hook(f"{modules}/absent.py:f")


def test_signatures_are_checked_with_the_args_of_the_configuration() -> None:
    def generate(task: object, client: object, *, turns: int = 2) -> None: ...

    params = ["task", "client"]
    check_signature(generate, params, "m:f")
    check_signature(generate, params, "m:f", ["turns"])
    check_signature(functools.partial(generate, turns=1), params, "m:f")
    with pytest.raises(HookError, match=r"got an unexpected keyword argument 'turn'"):
        check_signature(generate, params, "m:f", ["turn"])
    with pytest.raises(HookError, match=r"too many positional arguments"):
        check_signature(generate, ["task", "client", "more"], "m:f")
    with pytest.raises(HookError, match=r"missing a required argument: 'client'\).*expected a callable \(task\)"):
        check_signature(generate, ["task"], "m:f")
    with pytest.raises(HookError, match="int, which cannot be called"):
        check_signature(3, params, "m:f")


def test_a_generate_that_is_not_async_is_refused() -> None:
    async def good() -> None: ...

    class Callable:
        async def __call__(self) -> None: ...

    check_async(good, "m:f")
    check_async(functools.partial(good), "m:f")
    check_async(Callable(), "m:f")
    with pytest.raises(HookError, match="which is not async; expected an `async def` function"):
        check_async(lambda: None, "m:f")


class GoodRows:
    def row(self, epoch: int, index: int) -> dict[str, object]:
        return {"prompt": f"{epoch}/{index}"}

    def __len__(self) -> int:
        return 3


class ShortRows(GoodRows):
    def row(self, index: int) -> dict[str, object]:  # type: ignore[override]
        return {}


def test_rows_are_checked_as_class_and_as_object() -> None:
    check_rows(GoodRows, "m:Rows")
    check_rows(GoodRows(), "m:Rows")
    with pytest.raises(HookError, match="list without them"):
        check_rows([], "m:Rows")
    for candidate in (ShortRows, ShortRows()):
        with pytest.raises(HookError, match=r"too many positional arguments"):
            check_rows(candidate, "m:Rows")
