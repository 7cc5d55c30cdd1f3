"""`reward.type` and its options: typed, closed, and refused with the line and the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest
from reward_recipe import load

from physarum.actors.context import RunFolder
from physarum.actors.preflight import _libraries
from physarum.actors.reward.scorer import group_scorer_of, limits_of, scorer_of
from physarum.agents.rewards import scoring
from physarum.configs.checks.host import check_secrets
from physarum.configs.checks.imports import check_hooks
from physarum.configs.errors import ConfigError
from physarum.configs.loader import dump, resolve
from physarum.configs.reward_rules import read_options
from physarum.configs.reward_types import ALIASES, SECTIONS, SELF_CONTAINED, TEXTS, canonical

ENGINES = Path("/run/engines.json")


def refusal(folder: Path, reward: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, reward, *words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "means"),
    [("math", "math"), ("gpqa", "choice"), ("boxed_gpqa", "boxed_choice"), ("boxed_math", "math"), ("dapo", "dapo")],
)
def test_slimes_names_are_accepted(tmp_path: Path, written: str, means: str) -> None:
    assert load(tmp_path, f"type: {written}").reward.type == means


@pytest.mark.parametrize(
    ("reward", "parts"),
    [
        ("type: maths", ["c.yaml:9: reward.type", "`maths`", "did you mean `math`"]),
        ("type: boxed_format", ["write `format`: it reads no text that could be boxed"]),
        ("type: zzz", ["use one of: choice"]),
        ("type: math\nargs: {answr: boxed}", ["c.yaml:10: reward.args.answr", "did you mean `reward.args.answer`"]),
        ("type: math\nargs: {timeout_s: 0}", ["reward.args.timeout_s", "a number of at least 1"]),
        ("type: regex", ["reward.args.pattern", "add `reward.args.pattern`"]),
        ("type: regex\nargs: {pattern: '('}", ["'(' (missing ) at position 1)", "correct the pattern"]),
        ("type: exact\nargs: {normalise: [caps]}", ["reward.args.normalise.0", "'case'"]),
        ("type: math\nhook: a:b", ["`hook` and `type`", "keep one of them"]),
        ("custom_rm: a:b\ntype: math", ["`type` and `custom_rm`"]),
        ("type: math\nbatched: true", ["`batched` without it"]),
        ("row_types: {math: {}}\nhook: a:b", ["`row_types` without it"]),
        ("type: math\nrow_types: {exakt: {}}", ["did you mean `exact`"]),
        ("type: math\nrow_types: {regex: {}}", ["reward.row_types.regex.pattern"]),
        ("type: remote_rm\nargs: {url: 'ftp://h'}", ["reward.args.url", "a URL such as http"]),
        ("type: remote_rm\nargs: {url: 'http://u:p@h'}", ["credentials", "without user or password"]),
        ("type: remote_rm\nargs: {url: 'http://h', token: x}", ["reward.args.token", "a key that names a secret"]),
        (
            "type: remote_rm\nargs: {url: 'http://h', deadline_s: 30}",
            ["c.yaml:10: reward.args.deadline_s", "`reward.timeout_s: 30`", "before the call is killed"],
        ),
        ("type: judge", ["exactly one of `url`, `engine`", "add one of them"]),
        ("type: judge\nargs: {engine: policy}", ["`reward.args.engine: policy` without `engines.policy.model`"]),
        ("type: judge\nargs: {engine: jury}", ["add `engines.jury.model`, or name a group"]),
        ("group: {}", ["exactly one of `hook`, `type`", "none of them"]),
        ("group: {type: tournament, args: {url: 'http://h', format: swis}}", ["reward.group.args.format", "'swiss'"]),
        ("group: {type: tournament}", ["exactly one of `url`, `engine`"]),
        (
            "group: {type: tournament, args: {url: 'http://h', format: anchor, rounds: 3}}",
            ["`rounds` with `format: anchor`", "remove `rounds`"],
        ),
        (
            "group: {type: tournament, timeout_s: 20, args: {url: 'http://h'}}",
            ["`reward.group.args.deadline_s: 25` with `reward.group.timeout_s: 20`"],
        ),
        (
            "type: remote_rm\ncount: 2\nworkers: 2\nargs: {url: 'http://h', concurrency: 3}",
            ["`reward.args.concurrency: 3` with 4 hook processes", "raise `reward.concurrency` instead"],
        ),
    ],
)
def test_refusals_name_the_line_and_the_remedy(tmp_path: Path, reward: str, parts: list[str]) -> None:
    message = refusal(tmp_path, reward)
    for part in parts:
        assert part in message


def test_another_type_or_hook_sets_aside_the_options_of_the_one_below(tmp_path: Path) -> None:
    written = "type: exact\nargs: {normalise: [case]}"
    assert load(tmp_path, written, "reward.type=f1").reward.args == {}
    assert load(tmp_path, written, "reward.type=f1", "reward.args.yes_no=false").reward.args == {"yes_no": False}
    replaced = load(tmp_path, written, "reward.hook=a:b").reward
    assert (replaced.type, replaced.hook, replaced.args) == (None, "a:b", {})


def test_the_written_form_is_read_again(tmp_path: Path) -> None:
    config = load(tmp_path, "type: gpqa\nrow_types: {regex: {pattern: a}}")
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert resolve(again) == config


def test_the_actor_calls_the_hook_behind_a_type_with_what_was_checked(tmp_path: Path) -> None:
    reward = load(tmp_path, "type: exact\nargs: {normalise: [case]}\nrow_types: {f1: {}}").reward
    scorer = scorer_of(reward, RunFolder(tmp_path), ENGINES)
    assert scorer is not None
    assert scorer.hook == scoring.HOOK
    assert scorer.args == {
        "name": "exact", "args": {"normalise": ["case"]}, "row_types": {"f1": {}}, "folder": f"{tmp_path}/start_model"
    }  # fmt: skip
    assert scorer_of(
        load(tmp_path, "hook: a:b\nargs: {c: 1}").reward, RunFolder(tmp_path), tmp_path / "engines.json"
    ) == ("a:b", {"c": 1})


def test_hook_processes_share_what_the_run_may_ask_of_a_service(tmp_path: Path) -> None:
    written = "type: remote\ncount: 2\nworkers: 3\nargs: {url: 'http://h', concurrency: 13, rate_per_s: 3}"
    scorer = scorer_of(load(tmp_path, written).reward, RunFolder(tmp_path), ENGINES)
    assert scorer is not None
    assert scorer.args["args"] == {"url": "http://h", "concurrency": 2, "rate_per_s": 0.5}


def test_hook_processes_are_told_where_a_judge_of_this_run_is_found(tmp_path: Path) -> None:
    config = load(tmp_path, "type: judge\nargs: {engine: jury}", "engines.jury.model=./jury")
    scorer = scorer_of(config.reward, RunFolder(tmp_path), ENGINES)
    assert scorer is not None
    assert scorer.args["args"] == {"engine": "jury", "engines_file": str(ENGINES)}


def test_a_function_of_slimes_is_anchored_and_checked(tmp_path: Path) -> None:
    functions = Path(__file__).parents[1] / "slime_functions.py"
    config = load(tmp_path, "custom_rm: ./rm.py:rm\nargs: {scale: 2}")
    assert config.reward.custom_rm == f"{tmp_path}/rm.py:rm"
    assert scorer_of(config.reward, RunFolder(tmp_path), ENGINES) == (
        "physarum.agents.rewards.custom:score",
        {
            "function": f"{tmp_path}/rm.py:rm",
            "args": {"scale": 2},
            "batched": False,
            "folder": f"{tmp_path}/start_model",
        },
    )
    for name, words in (("length", []), ("not_async", ["not_async, which is not async"])):
        found = [
            str(one)
            for one in check_hooks(load(tmp_path, f"custom_rm: {functions}:{name}"))
            if "custom_rm" in one.where
        ]
        assert len(found) == len(words)
        assert all(word in one for word, one in zip(words, found, strict=True))


def test_a_groups_reward_may_stand_alone_or_beside_ones_own(tmp_path: Path) -> None:
    written = "workers: 2\ngroup: {type: tournament, args: {url: 'http://h', concurrency: 8}}"
    reward = load(tmp_path, written).reward
    assert reward.group is not None and not reward.scores and scorer_of(reward, RunFolder(tmp_path), ENGINES) is None
    scorer = group_scorer_of(reward.group, reward.workers, RunFolder(tmp_path), ENGINES)
    assert scorer.args == {"args": {"url": "http://h", "concurrency": 4}, "folder": f"{tmp_path}/start_model"}
    limits = limits_of(reward, reward.group)
    assert (limits.grouped, limits.timeout_s) == (True, 300.0)
    own = load(tmp_path, f"type: math\n{written}", "reward.group.hook=./g.py:g").reward
    assert own.group is not None and own.scores
    assert (own.group.type, own.group.hook, own.group.args) == (None, f"{Path.cwd()}/g.py:g", {})


def test_a_library_that_is_not_installed_is_found_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(tmp_path, "type: f1\nrow_types: {math: {}}")
    assert list(_libraries(config)) == []
    monkeypatch.setattr("physarum.actors.preflight.importlib.util.find_spec", lambda name: None)
    (problem,) = _libraries(config)
    assert "reward.row_types.math: found `math` without math_verify" in str(problem)
    assert "pip install math-verify" in str(problem)


def test_an_evaluation_needs_what_scores_one_answer(tmp_path: Path) -> None:
    grouped, evaluated = "group: {type: tournament, args: {url: 'http://h'}}", "evaluation={hook: 'a:b'}"
    message = refusal(tmp_path, grouped, evaluated)
    assert "`evaluation` with `reward.group` alone" in message and "add `reward.hook` or `reward.type`" in message
    assert load(tmp_path, f"type: math\n{grouped}", evaluated).evaluation is not None


def test_a_token_that_is_not_in_the_environment_is_found_before_the_start(tmp_path: Path) -> None:
    config = load(tmp_path, "type: remote\nargs: {url: 'http://h', token_env: NOT_SET_AT_ALL}")
    (problem,) = check_secrets(config)
    assert "c.yaml:10: reward.args.token_env: found NOT_SET_AT_ALL" in str(problem)


def test_every_type_has_its_section_and_its_function() -> None:
    assert set(scoring._FUNCTIONS) == set(SECTIONS)
    assert set(SECTIONS) >= SELF_CONTAINED | TEXTS
    assert set(ALIASES.values()) <= set(SECTIONS)
    for name in SELF_CONTAINED:
        assert canonical(name) == name
        read_options(name, b"{}")  # defaults alone are enough
