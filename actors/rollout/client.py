"""The engine client of one rollout actor: its router over presence, its retries and limits, as configured."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from physarum.actors.context import Context
from physarum.actors.policy_engines import policy_group
from physarum.actors.rollout.router import PresenceRouter
from physarum.agents.client import EngineClient, open_session
from physarum.agents.fleet.breaker import BreakerPolicy
from physarum.agents.fleet.choice import ChoiceRules
from physarum.agents.retries import RetryPolicy
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.presence import Roster
from physarum.configs.rollout import RolloutConfig, RoutingConfig

_REQUEST_SHARE: Final = 0.9
"""Of an episode's time that one generation may take: its own error, which names the engines, then comes first."""


@contextlib.asynccontextmanager
async def open_client(context: Context) -> AsyncIterator[tuple[EngineClient, PresenceRouter]]:
    """The client of all episodes, and its router."""
    config = context.config.rollout
    engines = Roster(context.bus, "engine", on_change=lambda: router.notify())
    workers = Roster(context.bus, "rollout", on_change=lambda: router.notify())
    group = policy_group(context.config)
    front = context.config.engines[group].router if group in context.config.engines else None
    router = PresenceRouter(
        engines,
        group,
        workers=workers,
        me=context.identity.instance,
        rules=_rules(config.routing),
        breaker=_breaker(config.routing),
        front=front,
    )
    async with engines.open(), workers.open(), open_session() as session:
        tokenizer = FolderTokenizer(context.folder.start_model)
        client = EngineClient(
            session,
            router,
            tokenizer,
            retry=_retry(config),
            cache_per_version=True,
            episode_tokens=config.episode_tokens,
        )
        yield client, router


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
