"""Which runs publish versions at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from actor_fixture import BASE

from physarum.actors.trainer.offers import Offers
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line


@pytest.mark.parametrize(
    ("engines", "words", "wanted"),
    [
        ("{policy: {}}", [], True),
        ("{}", [], False),
        ("{}", ["checkpoint.versions.mirror=s3://bucket/prefix"], True),
    ],
)
def test_a_run_without_engines_publishes_for_those_that_read_its_mirror(
    tmp_path: Path, engines: str, words: list[str], wanted: bool
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        BASE.replace("engines: {policy: {}}", f"engines: {engines}").replace("objective: rl", "objective: sft")
    )
    config = resolve(recipe, parse_command_line(words))
    assert Offers(cast(Any, SimpleNamespace(config=config)), cast(Any, None), cast(Any, None)).wanted is wanted
