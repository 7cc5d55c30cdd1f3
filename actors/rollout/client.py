"""The engine client of one rollout actor: its router over presence, its retries and limits, as configured."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

import aiohttp

from physarum.actors.context import Context
from physarum.actors.engine.opening import opening
from physarum.actors.policies import named
from physarum.actors.policy_engines import evaluation_group, policy_group
from physarum.actors.rollout.choices import engine_choices
from physarum.actors.rollout.router import DEMAND, PresenceRouter
from physarum.agents.client import EngineClient
from physarum.agents.connections import open_session
from physarum.agents.engine_key import keyed
from physarum.agents.fleet.breaker import BreakerPolicy
from physarum.agents.fleet.choice import ChoiceRules
from physarum.agents.policies import Policies, PolicyParts
from physarum.agents.retries import RetryPolicy
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.presence import Roster
from physarum.configs.rollout import RolloutConfig, RoutingConfig
from physarum.configs.root import RootConfig
from physarum.configs.sampling import parameters

_REQUEST_SHARE: Final = 0.9
"""Of an episode's time that one generation may take: its own error, which names the engines, then comes first."""


class Clients(NamedTuple):
    """Of all episodes: `training`, and `evaluating` on the engines that are kept for it (the same where none are); `router` and
    `evaluating_router` choose for them, `others` for the further policies, whose engines serve both."""

    training: EngineClient
    evaluating: EngineClient
    router: PresenceRouter
    evaluating_router: PresenceRouter
    others: dict[str, PresenceRouter]


@contextlib.asynccontextmanager
async def open_clients(context: Context) -> AsyncIterator[Clients]:
    """All share connections, meter and counters."""
    config = context.config.rollout
    routers: list[PresenceRouter] = []

    def notify() -> None:
        for router in routers:
            router.notify()

    engines = Roster(context.bus, "engine", on_change=notify)
    workers = Roster(context.bus, "rollout", on_change=notify)
    fronts = Roster(context.bus, "router", on_change=notify)
    groups = [policy_group(context.config), evaluation_group(context.config)]
    routers += [_router(context, group, engines, workers, fronts) for group in dict.fromkeys(groups)]
    own, further = list(routers), [view for view in context.config.views() if view.policy]
    others = {
        view.policy: _router(context, policy_group(view), engines, workers, fronts, view.policy) for view in further
    }
    routers += others.values()
    parts = {view.policy: _parts(context, view, others[view.policy]) for view in further}
    async with engines.open(), workers.open(), fronts.open(), open_session(_keys(context)) as session:
        training = EngineClient(
            session,
            routers[0],
            FolderTokenizer(context.folder.start_model),
            retry=_retry(config),
            cache_per_version=True,
            episode_tokens=config.episode_tokens,
            choices=engine_choices(context.config, context.folder.start_model),
            stream_tokens=config.stream_tokens,
            policies=Policies(context.config.model.name, parts),
        )
        evaluating = training if len(own) == 1 else training.through(own[-1])
        yield Clients(training, evaluating, own[0], own[-1], others)


def _parts(context: Context, view: RootConfig, router: PresenceRouter) -> PolicyParts:
    """What the requests of a further policy have of their own."""
    model = context.folder.of_policy(view.policy).start_model
    own = view.policies[view.policy].sampling
    sampling = None if own is None else parameters(own)
    return PolicyParts(router, FolderTokenizer(model), engine_choices(view, model), sampling)


def _keys(context: Context) -> list[aiohttp.ClientMiddlewareType]:
    """What requests to engines of other machines carry; servers at a `url` are somebody else's."""
    own = opening(context)
    strangers = [str(url) for group in context.config.engines.values() for url in group.url or ()]
    return [] if own is None else [keyed(own.key, strangers)]


def _router(
    context: Context, group: str, engines: Roster, workers: Roster, fronts: Roster, policy: str = ""
) -> PresenceRouter:
    routing, configured = context.config.rollout.routing, context.config.engines.get(group)
    return PresenceRouter(
        engines,
        group,
        workers=workers,
        me=context.identity.instance,
        rules=_rules(routing),
        breaker=_breaker(routing),
        front=None if configured is None else configured.router,
        fronts=fronts,
        exact=configured is None or configured.pause == "retract",
        asks=named(DEMAND, policy),
    )


def _retry(config: RolloutConfig) -> RetryPolicy:
    return RetryPolicy(
        attempts=64,
        deadline_s=_REQUEST_SHARE * config.episode_timeout_s,
        request_timeout_s=config.request_timeout_s,
        room_s=config.room_timeout_s,
    )


def _rules(routing: RoutingConfig) -> ChoiceRules:
    return ChoiceRules(
        imbalance=routing.imbalance,
        slack_tokens=routing.slack_tokens,
        prefix_share=routing.prefix_share,
        patience_s=routing.patience_s,
    )


def _breaker(routing: RoutingConfig) -> BreakerPolicy:
    return BreakerPolicy(failures=routing.breaker_failures, base_s=routing.breaker_base_s, max_s=routing.breaker_max_s)
