"""Where the bus is and with which credentials; secrets come from the environment only and are never written down."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import msgspec

from physarum.bus.errors import BusUnreachableError
from physarum.configs.bus import BusConfig


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A NATS server or cluster. Credentials are read from the environment when the connection is made."""

    url: str
    token_env: str | None = None
    user_env: str | None = None
    password_env: str | None = None
    tls_ca: str | None = None
    request_timeout_s: float = 5.0

    @classmethod
    def of(cls, config: BusConfig, url: str) -> Endpoint:
        return cls(
            url=url,
            token_env=config.token_env,
            user_env=config.user_env,
            password_env=config.password_env,
            tls_ca=None if config.tls_ca is None else str(config.tls_ca),
            request_timeout_s=config.request_timeout_s,
        )

    def secret(self, name: str | None) -> str | None:
        """The value of environment variable `name`; raises BusUnreachableError when it is named but not set."""
        if name is None:
            return None
        value = os.environ.get(name)
        if value is None:
            raise BusUnreachableError(
                f"the bus needs the environment variable {name}, which is not set; export it before starting the run"
            )
        return value

    def tls(self) -> ssl.SSLContext | None:
        if self.tls_ca is None:
            return None
        if not Path(self.tls_ca).is_file():
            raise BusUnreachableError(f"bus.tls_ca is {self.tls_ca}, which is not a file; give the CA's PEM file")
        return ssl.create_default_context(cafile=self.tls_ca)
