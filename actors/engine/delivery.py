"""How an engine gets its weights: the transport that fits it, by configuration and by what is there."""

from __future__ import annotations

from pathlib import Path

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.environment import detect_device, engine_environment
from physarum.configs.engine import EngineConfig
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.staging import Staging
from physarum.weightsync.transports.disk import DiskTransport
from physarum.weightsync.transports.ipc import IpcTransport
from physarum.weightsync.transports.nccl import NcclTransport
from physarum.weightsync.transports.transport import Transport


async def transport_for(
    settings: EngineConfig, control: EngineControl, staging: Staging, python: Path, log_file: Path, name: str
) -> Transport:
    """`python` is the engine's own interpreter, which the agent needs for `ipc`; `name` the engine's in broadcasts.

    The agent is there when it returns: versions do not wait for its imports. Raises DeviceError.
    """
    device = detect_device()
    chosen = settings.transport
    if chosen == "auto":
        nodes = any(part.nodes > 1 for part in settings.parts)
        chosen = "ipc" if device == "cuda" and settings.url is None and not nodes else "disk"
    if chosen == "disk":
        return DiskTransport(control, staging)
    agent = DeviceAgent(python, engine_environment(device, settings.env), log_file, settings.update_timeout_s)
    await in_thread(agent.call, "hello", settings.start_timeout_s)
    ranks = (await control.capabilities()).ranks
    if chosen == "nccl":
        return NcclTransport(control, agent, ranks, settings.update_timeout_s, name)
    return IpcTransport(control, agent, ranks, settings.update_timeout_s)
