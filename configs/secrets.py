"""Secrets come from the environment only; a configuration holds the names of variables, never their values.

Invariant: a value stored under a name that looks like a secret is refused and never repeated in a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from physarum.configs.errors import SecretError

_SECRET_KEYS = frozenset(
    {
        *("token", "access_token", "auth_token", "hf_token"),
        *("password", "passwd", "ssl_keyfile_password", "secret", "credentials"),
        *("api_key", "apikey", "admin_api_key", "access_key", "secret_key", "secret_access_key", "private_key"),
    }
)
_SECRET_VARIABLE_ENDINGS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "CREDENTIALS")
_URL_WITH_USER = re.compile(r"^[a-z][a-z0-9+.-]*://[^/@\s]+@", re.IGNORECASE)


def is_secret_key(key: str) -> bool:
    """Whether a configuration key names a secret itself (`token`, `admin-api-key`), as against `token_env`."""
    return key.lower().replace("-", "_") in _SECRET_KEYS


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable's name looks like a secret: one of its `_` parts ends in TOKEN, KEY, ..."""
    return any(part.endswith(_SECRET_VARIABLE_ENDINGS) for part in name.upper().split("_"))


def url_holds_credentials(url: str) -> bool:
    """Whether a URL has a user or password before its host."""
    return _URL_WITH_USER.match(url) is not None


def read_secret(variable: str | None, environ: Mapping[str, str] | None = None) -> str | None:
    """The secret held by `variable`, or None when no variable is configured.

    Raises SecretError when the variable is configured but unset or empty.
    """
    if variable is None:
        return None
    value = (os.environ if environ is None else environ).get(variable, "")
    if not value:
        raise SecretError(
            f"environment variable {variable}: found no value; expected the secret that the configuration refers to. "
            f"Remedy: export {variable} before the start, or remove the key that names it."
        )
    return value
