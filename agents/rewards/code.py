"""The answer's program against its row's tests.

    ```python ... ``` (the last block) --> stdin -> stdout, compared outside     expected outputs never enter the sandbox
                                       --> asserts, run behind the program       a proof of having come to the end is asked

Invariant: 1 is given only to a program that was run, ended by itself with status 0, and passed. A program that ends early
(`sys.exit(0)` before the asserts) has not passed. Asserts run in the program's own process, so one that was written to look
for the proof can find it; tests by stdin and stdout have no such weakness.
"""

from __future__ import annotations

import ast
import asyncio
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

import orjson

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.extraction import after_thinking
from physarum.agents.rewards.sandbox import Ended, Sandbox
from physarum.configs import exact_json
from physarum.configs.reward_types import CodeReward

_FENCE: Final = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
_LANGUAGES: Final = frozenset({"", "python", "python3", "py"})
_HARNESS: Final = """\
import io, sys
proof = sys.stdin.readline().strip()
sys.stdin = io.StringIO()
names = {"__name__": "program"}
exec(compile(open("/program.py").read(), "/program.py", "exec"), names)
exec(compile(open("/test.py").read(), "/test.py", "exec"), names)
sys.__stdout__.write("\\n" + proof)
"""
_FORMS: Final = (
    'one of {"inputs": [...], "outputs": [...]}, [{"input": ..., "output": ...}, ...], {"asserts": [...]} and a list of'
    " assert statements"
)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What a program reads and must write."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class Assertion:
    """Statements that must run to their end behind the program."""

    code: str


Test = Dialogue | Assertion


async def score_code(answer: Answer, options: CodeReward) -> float:
    """1.0 where all tests pass, else 0.0, or with `partial` the share that passes.

    Raises RewardError for a row without usable tests, SandboxError where programs cannot be run.
    """
    tests = row_tests(answer)
    program = program_in(answer.text)
    if program is None:
        return 0.0
    sandbox, loop, passed = Sandbox(options), asyncio.get_running_loop(), 0
    ends_at = loop.time() + options.deadline_s
    for test in tests:
        left_s = ends_at - loop.time()
        if left_s <= 0:
            break
        good = await _passes(sandbox, program, test, options, min(options.timeout_s, left_s))
        if not good and not options.partial:
            return 0.0
        passed += good
    return passed / len(tests) if options.partial else float(passed == len(tests))


def program_in(text: str) -> str | None:
    """The last fenced block, Python or unnamed, behind the thinking; None without one, or where it is never closed."""
    fences = list(_FENCE.finditer(text := after_thinking(text)))
    found, opening = None, None
    for fence in fences:
        if opening is None:
            opening = fence
            continue
        if opening[1].lower() in _LANGUAGES:
            found = text[opening.end() + 1 : fence.start()]
        opening = None
    return None if opening is not None and opening[1].lower() in _LANGUAGES else found


def row_tests(answer: Answer) -> list[Test]:
    """`metadata.tests`, else the label; text is JSON, or a program of assertions (HumanEval: `test` and a call of `check`)."""
    given = answer.metadata.get("tests", answer.label)
    if isinstance(given, str):
        try:
            given = exact_json.loads(given)
        except orjson.JSONDecodeError:
            given = {"asserts": [given]} if given.strip() else None
    tests = _read(given)
    if not tests:
        raise RewardError(f"task {answer.task} has the tests {given!r:.120}; expected {_FORMS}")
    return tests


def _read(given: Any) -> list[Test]:
    """Empty for what is none of the forms."""
    match given:
        case {"fn_name": _}:
            return []
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            pairs = zip(inputs, outputs, strict=True)
            return [Dialogue(_text(one), _text(other)) for one, other in pairs]
        case {"asserts": [*codes]} if all(_asserts(code) for code in codes):
            setup = str(given.get("setup") or "")
            return [Assertion(f"{setup}\n{code}") for code in codes]
        case [*items] if all(_asserts(item) for item in items):
            return [Assertion(item) for item in items]
        case [*items] if all(isinstance(item, dict) and {"input", "output"} <= set(item) for item in items):
            return [Dialogue(_text(item["input"]), _text(item["output"])) for item in items]
    return []


def _asserts(code: Any) -> bool:
    """Text that asserts or calls something outside the functions it defines: every program would pass without. What does not
    parse fails when it is run."""
    try:
        return isinstance(code, str) and any(map(_does, ast.parse(code).body))
    except (SyntaxError, ValueError):
        return True


def _does(node: ast.AST) -> bool:
    if isinstance(node, (ast.Assert, ast.Call, ast.Raise)):
        return True
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return False
    return any(map(_does, ast.iter_child_nodes(node)))


def _text(value: Any) -> str:
    """Lines given as a list are joined, as APPS gives them; null is nothing."""
    if value is None:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


async def _passes(sandbox: Sandbox, program: str, test: Test, options: CodeReward, timeout_s: float) -> bool:
    if isinstance(test, Dialogue):
        ended = await sandbox.run(program, {}, test.stdin.encode(errors="replace"), timeout_s)
        return ended.exit_code == 0 and same_output(_said(ended), test.stdout, options.compare)
    proof = secrets.token_hex(16)
    files = {"program.py": program, "test.py": test.code}
    ended = await sandbox.run(_HARNESS, files, f"{proof}\n".encode(), timeout_s)
    return ended.exit_code == 0 and _said(ended).endswith(proof)


def same_output(said: str, wanted: str, compare: str) -> bool:
    """Line by line without blanks at their ends and empty lines at the end, or word by word."""
    if compare == "tokens":
        return said.split() == wanted.split()
    lines, expected = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (said, wanted))
    return lines == expected


def _said(ended: Ended) -> str:
    return ended.output.decode(errors="replace")
