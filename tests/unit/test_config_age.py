"""Per-stream differences are laid over the common age policy, value by value."""

from __future__ import annotations

from physarum.configs.age import AgeConfig, AgePolicy, StreamAge


def test_a_stream_has_the_common_policy_but_for_what_it_says() -> None:
    config = AgeConfig(bound=4, consumption="drop", streams={"fresh": StreamAge(bound=0, admission="pace")})
    assert config.of("main") == AgePolicy(bound=4, consumption="drop")
    assert config.of("fresh") == AgePolicy(bound=0, admission="pace", consumption="drop")
