"""Control services: every actor answers status, pause, resume, drain, stop, reload and dump on the bus (NATS micro)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import nats.micro
import orjson
from nats.micro.request import Request
from nats.micro.service import EndpointConfig, Service

from physarum.bus import names
from physarum.bus.connection import Bus

Verb = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def serve(bus: Bus, role: str, instance: str, verbs: Mapping[str, Verb]) -> Service:
    """Answers `verbs` on `ph.<run>.control.<role>.<instance>.<verb>`; errors go back to the caller by name."""
    service = await nats.micro.add_service(
        bus.client, name=f"physarum-{role}", version="1.0.0", description=f"{bus.run}/{role}/{instance}"
    )
    for name, verb in verbs.items():
        await service.add_endpoint(
            EndpointConfig(
                name=name,
                subject=names.control_subject(bus.run, role, instance, name),
                handler=_handler(verb),
                queue_group=instance,
            )
        )
    return service


async def call(bus: Bus, role: str, instance: str, verb: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Calls one verb. Raises BusRefusedError (nobody there) or BusUnreachableError (no answer in time)."""
    subject = names.control_subject(bus.run, role, instance, verb)
    reply = await bus.request(subject, orjson.dumps(body), timeout_s)
    headers = reply.headers or {}
    if "Nats-Service-Error" in headers:
        return {"error": headers["Nats-Service-Error"]}
    answer: dict[str, Any] = orjson.loads(reply.data)
    return answer


def _handler(verb: Verb) -> Callable[[Request], Awaitable[None]]:
    async def handle(request: Request) -> None:
        try:
            answer = await verb(orjson.loads(request.data) if request.data else {})
        except (ValueError, RuntimeError) as error:
            # One line: the text travels in a header.
            await request.respond_error("400", " ".join(str(error).split()), b"{}")
            return
        await request.respond(orjson.dumps(answer))

    return handle
