"""Which runs publish versions at all, and that none that engines need is left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from actor_fixture import BASE

from physarum.actors.trainer.offers import Offers
from physarum.actors.trainer.publication import Offer
from physarum.bus.version import Version
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.weightsync.errors import NoRoomError


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


class Publishing:
    """What Offers sees of a publication."""

    def __init__(self) -> None:
        self.idle, self.debt, self.again = True, 0, 0
        self.last: Version | None = None
        self.offered: list[Version] = []

    def offer(self, offer: Offer) -> None:
        self.idle = False
        self.offered.append(offer.version)

    def ask_again(self) -> None:
        self.again += 1

    def done(self) -> None:
        self.idle, self.last = True, self.offered[-1]


def _offers(publishing: Publishing, taken: list[int]) -> Offers:
    async def run(call: Any, limit_s: float, what: str) -> Any:
        taken.append(1)
        return lambda: None

    config = SimpleNamespace(
        policy="", engines={"policy": None}, trainer=SimpleNamespace(ordered=False, step_timeout_s=1.0)
    )
    actor = SimpleNamespace(config=config, torch=SimpleNamespace(run=run))
    return Offers(cast(Any, actor), cast(Any, None), cast(Any, publishing))


async def test_weights_that_came_while_others_were_published_are_offered_though_no_step_makes_new_ones() -> None:
    """Batches that are masked whole make no weights: what is never offered would keep every later batch over age."""
    publishing, taken = Publishing(), []
    offers = _offers(publishing, taken)
    await offers.make(Version("policy", 1, 1))
    for number in (2, 3, 4):
        await offers.make(Version("policy", 1, number))
    await offers.settle(Version("policy", 1, 4))
    assert publishing.offered == [Version("policy", 1, 1)] and publishing.debt == 3
    publishing.done()
    await offers.settle(Version("policy", 1, 4))
    publishing.done()
    await offers.settle(Version("policy", 1, 4))
    assert [one.number for one in publishing.offered] == [1, 4] and len(taken) == 2, "once, and the newest"


async def test_weights_for_which_there_was_no_room_are_offered_again_in_a_while() -> None:
    publishing = Publishing()
    offers = _offers(publishing, [])

    async def full(call: Any, limit_s: float, what: str) -> Any:
        raise NoRoomError("the host's memory is full")

    roomy, offers._actor.torch.run = offers._actor.torch.run, cast(Any, full)
    await offers.make(Version("policy", 1, 1))
    assert publishing.offered == [] and publishing.again == 1
    offers._actor.torch.run = roomy
    await offers.settle(Version("policy", 1, 1))
    assert publishing.offered == [Version("policy", 1, 1)]
    publishing.idle = True
    await offers.settle(Version("policy", 1, 1))
    assert len(publishing.offered) == 2, "there was none on its way to the host either"
