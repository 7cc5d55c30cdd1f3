"""The hub: a pinned snapshot of a model repository in the local cache.

Invariant: the folder returned holds every wanted file of the pinned revision, and a snapshot that the cache holds whole
is returned without opening a connection. HF_ENDPOINT (another hub) and HF_HUB_OFFLINE are read at each call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from physarum.configs.errors import HubAccessError, HubError, HubNotFoundError, HubOfflineError, HubUnreachableError
from physarum.configs.model import HubConfig
from physarum.configs.secrets import read_secret

Progress = Callable[[int, int], None]
"""Called with the bytes present and the bytes in all; the total grows while files are being discovered."""

_DEFAULT_ENDPOINT = "https://huggingface.co"
_METADATA_TIMEOUT_S = 20.0
_PARALLEL_FILES = 4
_BYTES_BAR = "huggingface_hub.snapshot_download"
_UNWANTED = ("*.onnx", "*.gguf", "*.pth", "*.h5", "*.msgpack", "*.tflite", "onnx/*", "original/*")
"""The same weights in other formats: neither the trainer nor the engine reads them."""


def fetch_hub(hub: HubConfig, progress: Progress | None) -> Path:
    """The folder of the pinned snapshot, downloaded when the cache does not hold it whole.

    Blocks; call it off the event loop. `progress` is called from download threads, one call at a time.
    Raises HubOfflineError, HubUnreachableError, HubNotFoundError, HubAccessError, HubError, SecretError.
    """
    if (cached := _from_cache(hub)) is not None:
        return cached
    if hub.offline or _offline_by_environment():
        raise HubOfflineError(
            f"hub model {_name(hub)}: found offline mode and no whole snapshot in {_cache(hub)}; expected the snapshot "
            "there. Remedy: fetch it once with model.hub.offline: false and HF_HUB_OFFLINE unset, or copy the cache."
        )
    return _download(hub, progress)


def _from_cache(hub: HubConfig) -> Path | None:
    try:
        return Path(_snapshot(hub, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _download(hub: HubConfig, progress: Progress | None) -> Path:
    at = f"hub model {_name(hub)} at {_endpoint()}"
    try:
        return Path(_snapshot(hub, token=read_secret(hub.token_env), tqdm_class=_bar_class(progress)))
    except GatedRepoError as error:
        raise _access_error(at, error) from error
    except RevisionNotFoundError as error:
        raise HubNotFoundError(
            f"{at}: found no such revision; expected a tag or commit of the repository. Remedy: correct model.hub.revision."
        ) from error
    except RepositoryNotFoundError as error:
        raise HubNotFoundError(
            f"{at}: found no such repository; expected one that this token may see. "
            "Remedy: correct model.hub.id, or name a variable with a token in model.hub.token_env."
        ) from error
    except (LocalEntryNotFoundError, httpx2.TransportError) as error:
        raise HubUnreachableError(
            f"{at}: found no answer ({_first_line(error)}); expected a hub. "
            "Remedy: check the network and HF_ENDPOINT; files that arrived are kept and not fetched again."
        ) from error
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise _access_error(at, error) from error
        raise HubError(
            f"{at}: found HTTP {error.response.status_code}; expected the model's files. Remedy: try again later."
        ) from error
    except OSError as error:
        raise HubError(
            f"{at}: found {error.strerror or error} while writing to {_cache(hub)}; expected room and permission there. "
            "Remedy: free space, or set model.hub.cache_dir."
        ) from error


def _snapshot(hub: HubConfig, **options: Any) -> str:
    folder: str = snapshot_download(
        hub.id,
        revision=hub.revision,
        cache_dir=hub.cache_dir,
        endpoint=_endpoint(),
        ignore_patterns=list(_UNWANTED),
        etag_timeout=_METADATA_TIMEOUT_S,
        max_workers=_PARALLEL_FILES,
        **options,
    )
    return folder


def _bar_class(progress: Progress | None) -> type[tqdm]:
    """The hub library reports through a tqdm class only: this one draws nothing and passes bytes on."""
    lock = threading.Lock()

    class ByteReport(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._reports = kwargs.get("name") == _BYTES_BAR and kwargs.get("unit") == "B"
            self._present_bytes = 0
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if progress is None or not self._reports:
                return
            with lock:
                self._present_bytes += int(n or 0)
                progress(self._present_bytes, max(int(self.total or 0), self._present_bytes))

    return ByteReport


def _access_error(at: str, error: HfHubHTTPError) -> HubAccessError:
    return HubAccessError(
        f"{at}: found access refused (HTTP {error.response.status_code}); expected a token that may read it. Remedy: "
        "accept the model's terms on the hub, and name the variable that holds the token in model.hub.token_env."
    )


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", _DEFAULT_ENDPOINT).rstrip("/")


def _offline_by_environment() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _name(hub: HubConfig) -> str:
    return f"{hub.id}@{hub.revision}"


def _cache(hub: HubConfig) -> str:
    return str(hub.cache_dir or "the hub library's cache")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
