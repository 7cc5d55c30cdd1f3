"""What the host must offer: secrets in the environment, free ports, enough devices, a run folder with room."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from physarum.configs.devices import assign_devices, device_groups, present_devices
from physarum.configs.errors import ConfigError, Problem, SecretError, Severity
from physarum.configs.origin import KeyPath, display_path, dotted
from physarum.configs.reward_rules import given_options
from physarum.configs.reward_types import BackendReward
from physarum.configs.root import RootConfig
from physarum.configs.secrets import read_secret

_MIB = 1 << 20
_REFUSED_BELOW_BYTES = 64 * _MIB
_WARNED_BELOW_BYTES = 1024 * _MIB


def check_secrets(config: RootConfig) -> Iterator[Problem]:
    """Every variable named by a `*_env` key is set, and the bus's certificate file exists."""
    named: dict[KeyPath, str | None] = {
        ("bus", "token_env"): config.bus.token_env,
        ("bus", "user_env"): config.bus.user_env,
        ("bus", "password_env"): config.bus.password_env,
        ("checkpoint", "token_env"): config.checkpoint.token_env,
        ("model", "hub", "token_env"): config.model.hub.token_env if config.model.hub is not None else None,
    }
    if (versions := config.checkpoint.versions) is not None:
        named[("checkpoint", "versions", "key_env")] = versions.key_env
    named |= {(*key, "token_env"): backend.token_env for key, backend in given_options(config.reward, BackendReward)}
    for key, variable in named.items():
        try:
            read_secret(variable)
        except SecretError:
            found, remedy = f"{variable}, which is not set", f"export {variable} before the start, or remove the key"
            yield Problem(Severity.ERROR, config.origins.where(key), found, "a variable with the secret", remedy)
    if (authority := config.bus.tls_ca) is not None and not authority.is_file():
        where, found = config.origins.where(("bus", "tls_ca")), f"no file {display_path(authority)}"
        yield Problem(Severity.ERROR, where, found, "a PEM certificate file", "correct the path")


def check_ports(config: RootConfig) -> Iterator[Problem]:
    """Fixed ports are free on the loopback interface, and no two servers of the run want the same one."""
    holders: dict[int, KeyPath] = {}
    for key, port in _fixed_ports(config):
        where = config.origins.where(key)
        if (holder := holders.setdefault(port, key)) != key:
            found = f"port {port} at `{dotted(holder)}` and at `{dotted(key)}`"
            yield Problem(Severity.ERROR, where, found, "a port of its own for each server", "change one of them")
        elif (fault := _bind_fault(port)) is not None:
            found = f"port {port}, which {fault}"
            yield Problem(Severity.ERROR, where, found, "a free port", "stop what holds it, or choose another port")


def _fixed_ports(config: RootConfig) -> Iterator[tuple[KeyPath, int]]:
    if config.bus.url is None and config.bus.port > 0:
        yield ("bus", "port"), config.bus.port
    if config.checkpoint.port:
        yield ("checkpoint", "port"), config.checkpoint.port
    if config.trainer.master_port:
        yield ("trainer", "master_port"), config.trainer.master_port
    for name, policy in config.policies.items():
        if policy.trainer.master_port:
            yield ("policies", name, "trainer", "master_port"), policy.trainer.master_port


def _bind_fault(port: int) -> str | None:
    """Why the port cannot be bound, or None. SO_REUSEADDR lets closed connections in TIME_WAIT not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OverflowError:
            return "is above 65535"
        except OSError as error:
            return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({error.strerror})"
    return None


def check_devices(config: RootConfig, machine: str | None = None) -> Iterator[Problem]:
    """No more devices are asked for than the host has."""
    if not any(group.amount for group in device_groups(config, machine).values()):
        return
    try:
        assign_devices(config, present_devices(), machine)
    except ConfigError as error:
        yield from error.problems


def check_disk(config: RootConfig, machine: str | None = None) -> Iterator[Problem]:
    """The run folder can be made and written, and its disk has room."""
    where, folder = config.origins.where(("run", "root")), config.run.folder_on(machine)
    nearest = _nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        found = f"{display_path(nearest)}, which cannot be written ({os.strerror(error.errno or errno.EACCES)})"
        remedy = "correct its permissions, or set `run.root` to a folder that can be written"
        yield Problem(Severity.ERROR, where, found, f"a writable folder for {display_path(folder)}", remedy)
        return
    free = shutil.disk_usage(nearest).free
    if free < _WARNED_BELOW_BYTES:
        severity = Severity.ERROR if free < _REFUSED_BELOW_BYTES else Severity.WARNING
        needed = _REFUSED_BELOW_BYTES if severity is Severity.ERROR else _WARNED_BELOW_BYTES
        found = f"{free // _MIB} MiB free on the disk of {display_path(folder)}"
        remedy = "free space there, or set `run.root` to another disk"
        yield Problem(severity, where, found, f"at least {needed // _MIB} MiB", remedy)


def _nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
