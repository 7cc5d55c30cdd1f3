"""deploy/locks: environments are built once, whole or not at all, and only from pinned packages.

The interpreter and pip are stand-ins that write down what they were asked; the script is the real one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LOCKS = Path(__file__).resolve().parents[2] / "deploy" / "locks"
PIN = re.compile(r"^[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+$")

PYTHON = f"""#!/bin/bash
case "$*" in
    "-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin"; echo "venv $(basename "$4")" >>"$CALLS" ;;
    "-c import ensurepip, venv") exit "${{WITHOUT_VENV:-0}}" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
PIP = """#!/bin/bash
for last; do :; done
name=$(basename "$last")
if [ "$name" = "${BREAKS_AT:-}" ]; then exit 1; fi
echo "pip $name" >>"$CALLS"
"""
MAIN = ["venv .venv", "pip torch.txt", "pip cpu.txt", "pip cpu-nodeps.txt", "pip {tree}"]


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Tree:
    """A project of its own with the real script and locks; `sync` returns what was newly asked of python and pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.locks = folder / "deploy" / "locks"
        self.calls = folder / "calls"
        self.programs = folder / "programs"
        shutil.copytree(LOCKS, self.locks)
        self.programs.mkdir()
        script(self.programs / "python", PYTHON)
        script(self.programs / "pip", PIP)
        (folder / "pyproject.toml").write_text("[project]\n")

    def run(self, step: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHON": str(self.programs / "python"),
            "PIP": str(self.programs / "pip"),
            "CALLS": str(self.calls),
            **variables,
        }
        command = [str(self.locks / "sync"), step]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def sync(self, step: str, **variables: str) -> list[str]:
        self.calls.write_text("")
        done = self.run(step, **variables)
        assert done.returncode == 0, done.stderr
        return self.calls.read_text().splitlines()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def expected(tree: Tree) -> list[str]:
    return [call.format(tree=tree.folder.name) for call in MAIN]


def test_environment_is_built_once(tree: Tree) -> None:
    assert tree.sync("main") == expected(tree)
    assert tree.sync("main") == []
    assert tree.sync("dev") == ["pip dev.txt"]
    assert tree.sync("dev") == []
    assert tree.sync("engine") == ["venv .venv-engine", "pip torch.txt", "pip engine-cpu.txt"]
    assert tree.sync("engine") == []


@pytest.mark.parametrize("breaks_at", ["torch.txt", "cpu.txt", "cpu-nodeps.txt"])
def test_interrupted_build_is_built_again_from_nothing(tree: Tree, breaks_at: str) -> None:
    assert tree.run("main", BREAKS_AT=breaks_at).returncode != 0
    assert not list((tree.folder / ".venv").glob(".physarum-*"))
    assert tree.sync("main") == expected(tree)


def test_failed_rebuild_does_not_keep_the_old_stamp(tree: Tree) -> None:
    tree.sync("main")
    before = (tree.locks / "cpu.txt").read_text()
    (tree.locks / "cpu.txt").write_text(before + "# changed\n")
    assert tree.run("main", BREAKS_AT="cpu.txt").returncode != 0
    (tree.locks / "cpu.txt").write_text(before)
    assert tree.sync("main") == expected(tree), "half of another lock is in the environment"


def test_changed_lock_rebuilds_its_environment_only(tree: Tree) -> None:
    tree.sync("dev")
    tree.sync("engine")
    with (tree.locks / "dev.txt").open("a") as lock:
        lock.write("# changed\n")
    assert tree.sync("dev") == ["pip dev.txt"]
    with (tree.locks / "cpu.txt").open("a") as lock:
        lock.write("# changed\n")
    assert tree.sync("dev") == [*expected(tree), "pip dev.txt"]
    assert tree.sync("engine") == []


def test_changed_project_metadata_is_installed_again(tree: Tree) -> None:
    tree.sync("main")
    (tree.folder / "pyproject.toml").write_text("[project]\nname = 'physarum'\n")
    assert tree.sync("main") == [f"pip {tree.folder.name}"]


def test_chosen_build_of_torch_rebuilds_both(tree: Tree) -> None:
    tree.sync("main")
    assert tree.sync("main", TORCH_SPEC="torch==2.13.0+cpu")[:2] == ["venv .venv", "pip torch==2.13.0+cpu"]


@pytest.mark.parametrize(("user", "installs"), [("1000", False), ("0", True)])
def test_missing_venv_module_is_installed_by_root_and_named_to_others(tree: Tree, user: str, installs: bool) -> None:
    script(tree.programs / "id", f"#!/bin/bash\necho {user}\n")
    script(tree.programs / "apt-get", '#!/bin/bash\necho "apt-get $*" >>"$CALLS"\n')
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    tree.calls.write_text("")
    done = tree.run("main", WITHOUT_VENV="1")
    calls = tree.calls.read_text().splitlines()
    if installs:
        assert calls[:2] == ["apt-get update -q", f"apt-get install -qy --no-install-recommends {package}"]
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert f"sudo apt-get install {package}" in done.stderr
        assert calls == []


def test_unknown_step_is_refused(tree: Tree) -> None:
    done = tree.run("everything")
    assert done.returncode != 0
    assert "expected main, dev or engine" in done.stderr


def pins(name: str) -> dict[str, str]:
    """Package (in the index's spelling) to version; every line that is not a comment must be a pin."""
    lines = [line.strip() for line in (LOCKS / name).read_text().splitlines()]
    entries = [line for line in lines if line and not line.startswith("#")]
    assert not [line for line in entries if not PIN.match(line)], "only exact pins belong in a lock"
    found = {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in (e.split("==") for e in entries)}
    assert len(found) == len(entries), f"{name} pins a package twice"
    return found


@pytest.mark.parametrize(
    "names",
    [("torch.txt", "cpu.txt", "cpu-nodeps.txt", "dev.txt"), ("torch.txt", "engine-cpu.txt")],
    ids=["main", "engine"],
)
def test_no_package_is_pinned_by_two_locks_of_an_environment(names: tuple[str, ...]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        twice = seen.keys() & pins(name).keys()
        assert not twice, f"{name} repeats {sorted(twice)}"
        seen |= pins(name)
