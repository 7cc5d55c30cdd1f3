"""Settings of a world: JSON there and back, and values that are refused."""

from typing import Any

import msgspec
import pytest

from physarum.actors.trainer.world_config import WorldConfig


def test_json_there_and_back() -> None:
    config = WorldConfig(hf_folder="m", ranks=2, betas=(0.9, 0.99), megatron={"recompute_modules": ["mlp"]})
    assert msgspec.json.decode(msgspec.json.encode(config), type=WorldConfig) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0; expected more than 0"),
        ({"lr": float("nan")}, "lr is nan; expected more than 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; expected 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorldConfig(hf_folder="m", **changes)
