"""How an engine gets its weights: the transport that fits it, by configuration and by what is there."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.environment import detect_device, engine_environment
from physarum.configs.engine import EngineConfig
from physarum.configs.sglang_arguments import DRAFT_MODEL
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.staging import Staging
from physarum.weightsync.transports.registry import Parts, Surroundings, fitting
from physarum.weightsync.transports.transport import Transport


def surroundings(settings: EngineConfig) -> Surroundings:
    """What is known of an engine before anything of it is started."""
    return Surroundings(
        device=detect_device(),
        started_here=settings.url is None,
        on_this_host=_on_this_host(settings),
        waits_for_weights=settings.waits_for_weights,
        own_draft=settings.sglang.get(DRAFT_MODEL) is not None,
    )


def _is_local(url: str) -> bool:
    """As the host itself knows: nobody is asked for a name, since who asks a name server may wait for long."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", socket.gethostname().lower())
    return address.is_loopback or str(address) in _own_addresses()


def _own_addresses() -> set[str]:
    """Of this host's interfaces, as text."""
    found = (one.address for interface in psutil.net_if_addrs().values() for one in interface)
    return {address.partition("%")[0] for address in found}


def _on_this_host(settings: EngineConfig) -> bool:
    """All of its ranks: their devices are the agent's."""
    return all(_is_local(str(url)) for url in settings.url or ()) and all(part.nodes == 1 for part in settings.parts)


async def transport_for(
    settings: EngineConfig, control: EngineControl, staging: Staging, python: Path, log_file: Path, name: str
) -> Transport:
    """`python` is the engine's own interpreter, which the agent needs; `name` the engine's in broadcasts.

    The agent is there when it returns: versions do not wait for its imports. Raises DeviceError, TransportUnfitError.
    """
    can = await control.capabilities()
    found = replace(
        surroundings(settings),
        own_draft=can.own_draft,
        chooses_models=can.update_sessions,
        replicated=can.replicated,
    )
    kind = fitting(settings.transport, found)
    agent = DeviceAgent(python, engine_environment(found.device, settings.env), log_file, settings.update_timeout_s)
    if kind.by_agent:
        answer = await in_thread(agent.call, "hello", settings.start_timeout_s)
        kind = fitting(kind.name, replace(found, packages=answer["packages"]))
    return kind.make(
        Parts(
            target=control,
            staging=staging,
            agent=agent,
            ranks=can.ranks,
            timeout_s=settings.update_timeout_s,
            me=name,
        )
    )
