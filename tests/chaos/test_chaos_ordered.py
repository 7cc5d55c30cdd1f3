"""kill -9 of everybody in an ordered run: nothing is lost, and the final weights are those of an undisturbed run."""

from __future__ import annotations

import pytest

from tests.bench import chaos

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.bench, pytest.mark.timeout(300)]


async def test_an_ordered_run_that_is_killed_again_and_again_ends_with_the_same_bits() -> None:
    found = await chaos.measure("smoke")
    # Six where recovery is quick: the run goes on meanwhile, and nobody is killed in its last steps.
    assert found["kills"] >= 3
    assert (found["lost"], found["trained_twice"], found["wrong_version"]) == (0, 0, 0)
    assert found["checked_tokens"] > 0
    assert found["ordered_bit_equal"] is True
    (account,) = found["account"]
    assert account["imbalance"] == 0 and account["dead"] == 0
