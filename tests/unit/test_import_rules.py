"""What product code must not contain, read from its syntax; and the directions in which packages may import.

Each rule has a positive and a negative example below: a rule that finds nothing anywhere would pass for ever.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("actors", "agents", "bus", "configs", "weightsync")
# Where printing is the purpose.
PRINTERS = ("actors/actorctl/",)
PICKLES = frozenset({"pickle", "cloudpickle", "dill", "shelve", "marshal"})
# Read a foreign format, and run nothing of it: the modules say how.
FOREIGN_READERS = ("actors/trainer/megatron/record_pickle.py", "actors/trainer/megatron/common_state.py")
BROAD = frozenset({"Exception", "BaseException"})
# A boundary (a user's hook, the end of a process) must outlive any fault; it says so, with its reason, on the line.
BOUNDARY = re.compile(r"# noqa: BLE001 - \w+")

Rule = Callable[[ast.AST], Iterator[str]]


def unprefixed_imports(node: ast.AST) -> Iterator[str]:
    """`import bus`, `from agents.client import Client`: other distributions own these names."""
    for module in _imported(node):
        if module.split(".")[0] in PACKAGES:
            yield f"imports {module}; expected physarum.{module}"


def relative_imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.level:
        yield "imports relatively; expected the full name, physarum. first"


def pickles(node: ast.AST) -> Iterator[str]:
    for module in _imported(node):
        if module.split(".")[0] in PICKLES:
            yield f"imports {module}; expected physarum.bus.codec, safetensors or JSON"


def prints(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        yield "prints; expected logging.getLogger(__name__)"


def broad_excepts(node: ast.AST) -> Iterator[str]:
    """A handler of everything must end in `raise`, else it hides faults that nobody thought of."""
    if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises(node):
        yield "catches all and goes on; expected exceptions by name, a raise at the end, or `# noqa: BLE001 - reason`"


RULES: tuple[Rule, ...] = (unprefixed_imports, relative_imports, pickles, prints, broad_excepts)


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module


def _is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(kind, ast.Name) and kind.id in BROAD for kind in kinds)


def _raises(handler: ast.ExceptHandler) -> bool:
    """Whether the handler's last statement raises."""
    return isinstance(handler.body[-1], ast.Raise)


def violations(source: str, rule: Rule) -> list[tuple[int, str]]:
    """(line, what was found) for each breach of `rule`."""
    lines = source.splitlines()
    breaches = [(getattr(node, "lineno", 0), found) for node in ast.walk(ast.parse(source)) for found in rule(node)]
    if rule is broad_excepts:
        return [breach for breach in breaches if not BOUNDARY.search(lines[breach[0] - 1])]
    return breaches


@functools.cache
def product_files() -> tuple[Path, ...]:
    """Every module of ours, by its real path and relative to the root."""
    found = tuple(path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    assert len(found) > len(PACKAGES), f"found {len(found)} product files under {ROOT}; expected all of them"
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_product_code_keeps_the_rule(rule: Rule) -> None:
    breaches = [
        f"{path}:{line}: {found}"
        for path in product_files()
        if not (rule is prints and path.as_posix().startswith(PRINTERS))
        if not (rule is pickles and path.as_posix() in FOREIGN_READERS)
        for line, found in violations((ROOT / path).read_text(), rule)
    ]
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.parametrize("path", ["tests", "physarum/__init__.py"])
def test_code_outside_the_packages_imports_by_the_full_name(path: str) -> None:
    files = sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path]
    breaches = [
        f"{file.relative_to(ROOT)}:{line}: {found}"
        for file in files
        for line, found in violations(file.read_text(), unprefixed_imports)
    ]
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.parametrize(
    ("rule", "breach"),
    [
        (unprefixed_imports, "import bus"),
        (unprefixed_imports, "import bus.codec as codec"),
        (unprefixed_imports, "def f():\n    from agents.client import Client"),
        (relative_imports, "from . import codec"),
        (relative_imports, "from ..bus import codec"),
        (pickles, "import pickle"),
        (pickles, "from cloudpickle import dumps"),
        (prints, "print('done')"),
        (broad_excepts, "try:\n    f()\nexcept:\n    pass"),
        (broad_excepts, "try:\n    f()\nexcept Exception as error:\n    log(error)"),
        (broad_excepts, "try:\n    f()\nexcept (OSError, BaseException):\n    return"),
        (broad_excepts, "try:\n    f()\nexcept Exception:\n    if x:\n        raise"),
        (broad_excepts, "try:\n    f()\nexcept Exception:  # noqa: BLE001\n    pass"),
    ],
)
def test_breach_is_found(rule: Rule, breach: str) -> None:
    assert violations(breach, rule)


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (unprefixed_imports, "import physarum.bus.codec\nfrom physarum.agents import client\nimport business"),
        (relative_imports, "from physarum.bus import codec"),
        (pickles, "import pickletools_of_ours\nfrom physarum.bus import codec"),
        (prints, "log.info('print')\nself.print('row')\npprint(x)"),
        (broad_excepts, "try:\n    f()\nexcept OSError:\n    pass"),
        (broad_excepts, "try:\n    f()\nexcept BaseException:\n    clean_up()\n    raise"),
        (
            broad_excepts,
            "try:\n    hook()\nexcept Exception:  # noqa: BLE001 - a user's hook may raise anything\n    pass",
        ),
        (broad_excepts, "try:\n    f()\nexcept Exception as error:\n    raise Named('found') from error"),
    ],
)
def test_allowed_code_is_not_reported(rule: Rule, allowed: str) -> None:
    assert not violations(allowed, rule)


def test_packages_import_in_one_direction_only() -> None:
    """configs <- bus <- weightsync, agents <- actors, and the other contracts of pyproject.toml."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 broken." in done.stdout, done.stdout


def test_each_package_is_linked_once_under_the_import_name() -> None:
    links = {path.name: path for path in (ROOT / "physarum").iterdir() if path.is_symlink()}
    assert sorted(links) == sorted(PACKAGES)
    assert {name: str(path.readlink()) for name, path in links.items()} == {name: f"../{name}" for name in PACKAGES}
