"""Every stream and consumer of a run, in one readable place.

| stream   | retention                    | full                | why |
|----------|------------------------------|---------------------|-----|
| TASKS    | work queue                   | refuse new (waits)  | a lease on each task; a dead worker's is redelivered |
| EPISODES | work queue                   | refuse new (waits)  | the same, for executions that wait for their reward |
| SAMPLES  | log, trimmed by the trainer  | refuse new (waits)  | the trainer reads by its own cursor |
| EVALS    | log                          | refuse new (waits)  | scored evaluation executions, outside the account |
| LEDGER   | log, one for each policy     | refuse new (waits)  | plan, step, durable and rollback records |
| DEAD     | log                          | refuse new (waits)  | what could not be processed, with its reason |
| ADDED    | log                          | refuse new (waits)  | rows that were added at run time, one subject each |
| METRICS  | memory, one hour             | discard old         | numbers for tables and plots; may be lost |
| LEASE, PRESENCE | last value per key, TTL | -                  | who acts, who is there |
| WEIGHTS, RUN    | last value per key      | -                  | version heads, run state; compare-and-set |
| CLAIMS   | last value per key           | -                   | which leased messages each worker holds |
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import nats.errors
import nats.js.errors
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RePublish, RetentionPolicy, StorageType, StreamConfig

from physarum.bus import names
from physarum.bus.connection import Bus
from physarum.bus.errors import BusRefusedError, BusUnreachableError
from physarum.bus.names import StreamKey
from physarum.configs.bus import BusConfig

# 128 pullers per rollout host on one durable consumer; the server's default of 512 cannot be changed later.
_MAX_WAITING: Final = 4096
_DEDUPE_WINDOW_S: Final = 120.0
_METRICS_AGE_S: Final = 3600.0
_METRICS_BYTES: Final = 256 << 20
_LOGS: Final[tuple[StreamKey, ...]] = ("samples", "evals", "ledger", "dead")
_SHARE: Final[dict[StreamKey, int]] = {"samples": 5, "evals": 1, "ledger": 1, "dead": 1}
_SHARES: Final = sum(_SHARE.values()) + 1  # one is left to the registers, which reserve nothing
_LEAST_LOG_BYTES: Final = 1 << 20
_QUEUES: Final[tuple[StreamKey, ...]] = ("tasks", "episodes")
_EXPIRING: Final[tuple[StreamKey, ...]] = ("lease", "presence", "claims")
# Nobody waits on their values: a heartbeat is taken as it is published, claims are read when their owner is gone.
_UNWATCHED: Final = ("presence", "claims")
_REGISTERS: Final[tuple[StreamKey, ...]] = ("weights", "run")
# "no suitable peers for placement" and "temporarily unavailable": a cluster whose servers do not all know each other yet.
_FORMING: Final = (10005, 10008)
_BACKOFF_MAX_S: Final = 2.0


def stream_configs(run: str, config: BusConfig, policies: Sequence[str] = ()) -> list[StreamConfig]:
    """The streams of one run. Durable ones share `bus.max_store_bytes`; registers hold one message per key.

    `policies`: the further ones, whose ledgers share the run's."""
    ledgers = [names.ledger_of(policy) for policy in policies]
    sizes = {key: _log_bytes(key, config) for key in (*_LOGS, "added")}
    sizes |= {key: sizes["ledger"] // (1 + len(ledgers)) for key in (*ledgers, "ledger")} if ledgers else {}
    durable = [_log(run, key, size) for key, size in sizes.items()]
    queues = [_queue(run, key, config) for key in _QUEUES]
    registers = [_register(run, key, expiring=True) for key in _EXPIRING]
    registers += [_register(run, key, expiring=False) for key in _REGISTERS]
    streams = [*queues, *durable, *registers, _metrics(run)]
    for stream in streams:
        stream.num_replicas = config.replicas
    return streams


def consumer_configs(
    config: BusConfig, partitions: Sequence[int | None] = (None,)
) -> list[tuple[StreamKey, ConsumerConfig]]:
    """One consumer per task class (overlapping work-queue filters are refused), one for each partition of the training episodes
    ((None,): they are not parted), and one for those of evaluations."""
    tasks: list[tuple[StreamKey, ConsumerConfig]] = [
        ("tasks", _worker(config, f"tasks_{name}", name)) for name in names.TASK_CLASSES
    ]
    kinds = [*map(names.training, partitions), "eval"]
    return [*tasks, *(("episodes", _worker(config, f"episodes_{kind}", kind)) for kind in kinds)]


async def create(
    bus: Bus, config: BusConfig, policies: Sequence[str] = (), partitions: Sequence[int | None] = (None,)
) -> None:
    """Creates what is missing; existing streams of the same run are kept.

    A cluster that is still forming, or lacks a server for `bus.replicas`, is waited for until `bus.start_timeout_s`.
    Raises BusRefusedError when the streams differ or the cluster stays too small, BusUnreachableError without JetStream.
    """
    context = bus.client.jetstream(timeout=bus.timeout_s)
    until = asyncio.get_running_loop().time() + config.start_timeout_s
    try:
        for stream in stream_configs(bus.run, config, policies):
            await _placed(partial(context.add_stream, stream), until)
        for key, consumer in consumer_configs(config, partitions):
            consumer.filter_subject = names.subject(bus.run, key, str(consumer.filter_subject)) + ".>"
            owner = names.stream(bus.run, key)
            await _placed(partial(context.add_consumer, owner, consumer), until)
    except (nats.errors.TimeoutError, nats.errors.NoRespondersError) as error:
        raise BusUnreachableError(
            f"the server at {bus.endpoint.url} did not answer for JetStream; enable it there (jetstream {{ store_dir: ... }})"
        ) from error
    except nats.js.errors.APIError as error:
        raise BusRefusedError(
            f"the streams of run {bus.run} could not be created: {error.description} (code {error.err_code});"
            f" {_remedy(error, config)}"
        ) from error


async def _placed(request: Callable[[], Awaitable[object]], until: float) -> None:
    """Repeats a request that a cluster refuses while its servers are not all there; the last refusal is raised."""
    loop = asyncio.get_running_loop()
    for attempt in itertools.count():
        try:
            await request()
            return
        except nats.js.errors.APIError as error:
            wait_s = random.uniform(0.05, min(_BACKOFF_MAX_S, 0.1 * 2**attempt))
            if error.err_code not in _FORMING or loop.time() + wait_s > until:
                raise
        await asyncio.sleep(wait_s)


def _remedy(error: nats.js.errors.APIError, config: BusConfig) -> str:
    if error.err_code in _FORMING:
        return (
            f"`bus.replicas: {config.replicas}` needs as many servers of the cluster up, and they were not within"
            f" `bus.start_timeout_s: {config.start_timeout_s:g}`: start them, or lower bus.replicas"
        )
    return "if the store is of another version or configuration, use a new run name or remove its folder"


def _log_bytes(key: StreamKey, config: BusConfig) -> int:
    """A log's share of what the queues leave of the store. The server reserves it, so the shares must fit together."""
    for_logs = config.max_store_bytes - len(_QUEUES) * config.tasks_max_bytes
    if for_logs < _LEAST_LOG_BYTES * _SHARES:
        raise BusRefusedError(
            f"bus.max_store_bytes is {config.max_store_bytes} and the {len(_QUEUES)} queues take {config.tasks_max_bytes}"
            f" each (bus.tasks_max_bytes); the logs need at least {_LEAST_LOG_BYTES * _SHARES} more: raise max_store_bytes"
        )
    if key == "added":  # small, and out of what the registers leave: the others stay as runs of before have them
        return for_logs // _SHARES // 4
    return for_logs * _SHARE[key] // _SHARES


def _queue(run: str, key: StreamKey, config: BusConfig) -> StreamConfig:
    return StreamConfig(
        name=names.stream(run, key),
        subjects=[names.all_subjects(run, key)],
        retention=RetentionPolicy.WORK_QUEUE,
        discard=DiscardPolicy.NEW,
        max_bytes=config.tasks_max_bytes,
        storage=StorageType.FILE,
        duplicate_window=_DEDUPE_WINDOW_S,
        allow_direct=True,
    )


def _log(run: str, key: StreamKey, max_bytes: int) -> StreamConfig:
    return StreamConfig(
        name=names.stream(run, key),
        subjects=[names.all_subjects(run, key)],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.NEW,
        max_bytes=max_bytes,
        storage=StorageType.FILE,
        duplicate_window=_DEDUPE_WINDOW_S,
        allow_direct=True,
    )


def _register(run: str, key: StreamKey, *, expiring: bool) -> StreamConfig:
    changed = f"{names.changed_subject(run, key)}.>"
    return StreamConfig(
        name=names.stream(run, key),
        subjects=[names.all_subjects(run, key)],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        storage=StorageType.FILE,
        duplicate_window=_DEDUPE_WINDOW_S,
        allow_direct=True,
        allow_msg_ttl=expiring or None,
        # Watchers are told after a value is stored; a plain subscription may be told before, and read the old one.
        republish=None
        if key in _UNWATCHED
        else RePublish(src=names.all_subjects(run, key), dest=changed, headers_only=True),
    )


def _metrics(run: str) -> StreamConfig:
    return StreamConfig(
        name=names.stream(run, "metrics"),
        subjects=[names.all_subjects(run, "metrics")],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_bytes=_METRICS_BYTES,
        max_age=_METRICS_AGE_S,
        storage=StorageType.MEMORY,
        allow_direct=True,
    )


def _worker(config: BusConfig, durable: str, key: str) -> ConsumerConfig:
    return ConsumerConfig(
        durable_name=durable,
        filter_subject=key,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=config.ack_wait_s,
        # Redelivery is bounded by the receiver (WorkQueue), which also moves the message to DEAD: with a server-side
        # limit the message would stay in the work queue for ever, delivered to nobody.
        max_deliver=-1,
        max_waiting=_MAX_WAITING,
        max_ack_pending=-1,
    )
