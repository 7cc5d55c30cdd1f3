"""Hooks import, and take what their roles pass.

| hook | called as | returns |
|---|---|---|
| source.hook, evaluation.hook | (seed, **args) | hooks.Rows |
| source.curriculum.hook | (seed, **args) | a Curriculum |
| rollout.generate | async (task, client, **args) | samples |
| reward.hook | (execution, **args), sync or async (async with reward.concurrency > 1) | a reward |
| reward.group.hook | (executions, **args), likewise | a list of rewards |
| reward.custom_rm | async (args, sample) or (args, samples) | a reward, or a list of them |
| model.factory.hook | (folder, **args) | nothing: it fills the folder |
| trainer.algorithm.advantage | (batch, **hook_args) | advantages [T] |
| trainer.algorithm.loss | (logprobs, columns, **hook_args) | a loss per token [N] |
| environments.CLASS.hook | async (place, **args) | an instance with `async close()` |
| engines.GROUP.canary.gate | async (probe, **args) | nothing: it raises to refuse |
| checkpoint.after_publish, .before_pull | async (manifest, **args) | nothing |
| filters.groups, filters.executions | (headers, **args) | whether they pass |

What a source function returns is known only once it is called: the source role applies `hooks.check_rows` then. A
source that is a class is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from physarum.configs.errors import HookError, Problem, Severity
from physarum.configs.evaluation import EvaluationSet
from physarum.configs.filters import GroupHook
from physarum.configs.hooks import Hook, check_async, check_rows, check_signature, load_hook
from physarum.configs.origin import KeyPath
from physarum.configs.root import RootConfig
from physarum.configs.rows import RowsConfig
from physarum.configs.types import Arguments


@dataclass(frozen=True, slots=True)
class _Use:
    """One place that names a hook, and how it is called from there."""

    key: KeyPath
    hook: Hook | None
    params: tuple[str, ...]
    args: Arguments
    is_async: bool = False
    gives_rows: bool = False
    is_tried: bool = False
    """Ours, so it can be called: it says what is wrong with its arguments."""


def check_hooks(config: RootConfig) -> Iterator[Problem]:
    """One problem for each hook that does not import or does not take its arguments."""
    for use in _uses(config):
        if use.hook is None:
            continue
        try:
            _check(use, use.hook)
        except HookError as error:
            where = config.origins.where(use.key)
            found = f"hook {error.hook}: {error.found}"
            yield Problem(Severity.ERROR, where, found, error.expected, error.remedy)


def _check(use: _Use, hook: Hook) -> None:
    target = load_hook(hook)
    check_signature(target, use.params, hook, use.args)
    if use.is_async:
        check_async(target, hook)
    if use.gives_rows and isinstance(target, type):
        check_rows(target, hook)
    if use.is_tried:
        target(0, **use.args)  # type: ignore[operator]  # check_signature: it can be called like this


def _uses(config: RootConfig) -> Iterator[_Use]:
    source, evaluation = config.source, config.evaluation
    for key, part in source.parts():
        yield _rows_use(("source", *key), part)
    yield _Use(("rollout", "generate"), config.rollout.generate, ("task", "client"), config.rollout.args, is_async=True)
    reward = config.reward
    together = reward.concurrency > 1  # in one event loop
    yield _Use(("reward", "hook"), reward.hook, ("execution",), reward.args, is_async=together)
    if reward.group is not None:
        grouped = reward.group
        yield _Use(("reward", "group", "hook"), grouped.hook, ("executions",), grouped.args, is_async=together)
    yield _Use(("reward", "custom_rm"), reward.custom_rm, ("args", "sample"), {}, is_async=True)
    if source.curriculum is not None:
        chosen = source.curriculum
        yield _Use(("source", "curriculum", "hook"), chosen.hook, ("seed",), chosen.args)
    if evaluation is not None:
        for key, part in evaluation.parts():
            yield from _set_uses(("evaluation", *key), part)
    for view in config.views():
        yield from _policy_uses(view)
    for name, call in (
        ("after_publish", config.checkpoint.after_publish),
        ("before_pull", config.checkpoint.before_pull),
    ):
        if call is not None:
            yield _Use(("checkpoint", name, "hook"), call.hook, ("manifest",), call.args, is_async=True)
    for name, kind in config.environments.items():
        yield _Use(("environments", name, "hook"), kind.hook, ("place",), kind.args, is_async=True)
    for name, group in config.engines.items():
        if group.canary is not None:
            canary, key = group.canary, ("engines", name, "canary", "gate")
            yield _Use(key, canary.gate, ("probe",), canary.args, is_async=True)


def _policy_uses(config: RootConfig) -> Iterator[_Use]:
    """Of one policy."""
    factory, under = config.model.factory, config.under
    if factory is not None:
        yield _Use((*under, "model", "factory", "hook"), factory.hook, ("folder",), factory.args)
    yield from _algorithm_uses(config)
    for place, filters in (("groups", config.filters.groups), ("executions", config.filters.executions)):
        for one in filters:
            if isinstance(one, GroupHook):
                yield _Use((*under, "filters", place), one.hook, ("headers",), one.args)


def _rows_use(key: KeyPath, part: RowsConfig) -> _Use:
    """A hook; an environment is tried at once (held-out problems would be made first, and are of the same generator)."""
    found = part.row_hook()
    if found is None:
        return _Use((*key, "hook"), None, ("seed",), {})
    name = "hook" if part.environment is None else "environment"
    return _Use((*key, name), found[0], ("seed",), found[1], gives_rows=True, is_tried=part.environment is not None)


def _set_uses(key: KeyPath, part: EvaluationSet) -> Iterator[_Use]:
    yield _rows_use(key, part)
    if part.generate is not None:
        own = part.generate
        yield _Use((*key, "generate", "hook"), own.hook, ("task", "client"), own.args, is_async=True)
    if part.reward is not None:
        yield _Use((*key, "reward", "hook"), part.reward.hook, ("execution",), part.reward.args)


def _algorithm_uses(config: RootConfig) -> Iterator[_Use]:
    algorithm = config.trainer.algorithm
    for name, hook, params in (
        ("advantage", algorithm.advantage, ("batch",)),
        ("loss", algorithm.loss, ("logprobs", "columns")),
    ):
        if isinstance(hook, Hook):
            yield _Use((*config.under, "trainer", "algorithm", name), hook, params, algorithm.hook_args)
