"""What a run asks of its engines follows from every part of a group."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.actors.rollout.choices import engine_choices
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("setting", "seeded"),
    [
        ("engines.policy.sglang={enable-deterministic-inference: true}", True),
        ("engines.policy.servers=[{count: 1, sglang: {enable_deterministic_inference: true}}]", True),
        ("engines.policy.servers=[{count: 1, sglang: {enable-deterministic-inference: false}}]", False),
    ],
)
def test_requests_carry_seeds_where_any_server_of_the_group_follows_them(setting: str, seeded: bool) -> None:
    config = resolve(RECIPE, parse_command_line([setting, "run.seed=9"]))
    assert engine_choices(config, Path("unused")).seed == (9 if seeded else None)
