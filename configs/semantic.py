"""Checks over several sections at once, which need nothing but the configuration itself.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from physarum.configs.algorithm_rules import algorithm_findings
from physarum.configs.errors import Problem, Severity
from physarum.configs.reward_rules import reward_problems
from physarum.configs.root import RootConfig
from physarum.configs.rules import aging, placing, policies, running, scoring, serving, training
from physarum.configs.rules.finding import Rule

_RULES: tuple[Rule, ...] = (
    *aging.RULES,
    algorithm_findings,
    *training.RULES,
    *running.RULES,
    *scoring.RULES,
    *serving.RULES,
    *placing.RULES,
    *policies.RULES,
)


def semantic_problems(config: RootConfig) -> list[Problem]:
    """Every contradiction between sections; empty when the configuration fits together."""
    found_by_rules = [
        Problem(Severity.ERROR, config.origins.where(key), found, expected, remedy)
        for rule in _RULES
        for key, found, expected, remedy in rule(config)
    ]
    return [*found_by_rules, *reward_problems(config.reward, config.origins)]
