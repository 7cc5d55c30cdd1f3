"""One folder of an object store, by way of fsspec: whole objects by key. Blocking.

Invariant: an object is there whole or not at all, also on a file system, where one is written aside and renamed. How long a
call may take is the client's matter; where it must end, the bucket is spoken to by a process (apart.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from physarum.weightsync.errors import BucketError, BucketUnfitError, ObjectAbsentError

T = TypeVar("T")

REMEDY: Final = (
    "Install the extra `objects` (pip install 'physarum[objects]': s3fs, ossfs, gcsfs) or the scheme's own package"
)
_LOCAL: Final = ("file://", "local://")
ASIDE: Final = ".aside"
"""At the end of the name of what is being written to a file system."""


class Objects(Protocol):
    """What readers need of a bucket. `url` names it in messages."""

    @property
    def url(self) -> str: ...

    def get(self, key: str) -> bytes:
        """All of an object. Raises ObjectAbsentError, BucketError."""

    def sizes(self, below: str) -> dict[str, int]:
        """Bytes of every object whose key begins with `below/`, by its key. Raises BucketError."""


def missing_implementation(url: str) -> str:
    """Why the URL's scheme cannot be opened in this environment; "" when it can."""
    scheme = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        return f"no implementation of {scheme}:// ({error})"
    return ""


def client(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it. Raises BucketUnfitError where its implementation is not installed."""
    if missing := missing_implementation(url):
        raise BucketUnfitError(f"{url}: found {missing}; expected it in this environment. {REMEDY}")
    # An object store has no folders to make, and making one might make a bucket.
    path: str
    system, path = fsspec.core.url_to_fs(url, **({"auto_mkdir": True} if url.startswith(_LOCAL) else {}))
    return system, path


class Bucket:
    """What is under one URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._system, self._root = client(self.url)

    def get(self, key: str) -> bytes:
        found: bytes = self._told(key, lambda: self._system.cat_file(self._path(key)))
        return found

    def sizes(self, below: str) -> dict[str, int]:
        self._system.invalidate_cache()
        with suppress(ObjectAbsentError):
            found = self._told(below, lambda: self._below(self._path(below)))
            return {path.removeprefix(f"{self._root}/"): int(about["size"]) for path, about in found.items()}
        return {}

    def put(self, key: str, data: bytes) -> None:
        """Raises BucketError, ObjectAbsentError where there is no such bucket."""
        self._told(key, lambda: self._put(self._path(key), data))

    def remove(self, key: str) -> None:
        """Nothing, where it is not there. Raises BucketError."""
        with suppress(ObjectAbsentError):
            self._told(key, lambda: self._system.rm_file(self._path(key)))

    def _below(self, path: str) -> dict[str, Any]:
        """As `find`, which of a file system leaves out, without a word, whatever folder it cannot list: it would look empty."""
        if self._system.async_impl:  # of a service: it asks for all keys at once, and raises
            listed: dict[str, Any] = self._system.find(path, detail=True)
            return listed
        found: dict[str, Any] = {}
        for about in self._system.ls(path, detail=True):
            if about["type"] != "directory":
                found[about["name"]] = about
                continue
            with suppress(FileNotFoundError):  # it went meanwhile
                found |= self._below(about["name"])
        return found

    def _put(self, path: str, data: bytes) -> None:
        if not isinstance(self._system, LocalFileSystem):
            self._system.pipe_file(path, data)
            return
        self._system.pipe_file(path + ASIDE, data)
        self._system.mv(path + ASIDE, path)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _told(self, key: str, call: Callable[[], T]) -> T:
        """What `call` returns; what it raises is told with the object's name."""
        try:
            return call()
        except FileNotFoundError as error:
            raise ObjectAbsentError(f"{self.url}/{key} is not there ({error})") from error
        except Exception as error:
            raise BucketError(f"{self.url}/{key}: {type(error).__name__}: {error}") from error
