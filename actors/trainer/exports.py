"""Versions in Hugging Face form: the newest few stay on disk, as many as `checkpoint.keep_exports` says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from physarum.bus.errors import RecordError
from physarum.bus.version import Version

_WRITING: Final = "-writing"


def retain(folder: Path, newest: Version, keep: int | None) -> list[str]:
    """Removes all but the newest `keep` versions (None: none is removed), and what exports that were killed left behind;
    returns the names. What is no version of this model is somebody else's, and a later epoch's is its own trainer's. Blocking.
    """
    versions: list[tuple[Version, Path]] = []
    removed: list[Path] = []
    for path in folder.iterdir():
        unfinished = path.name.startswith(".") and path.name.endswith(_WRITING)
        version = _version(path.name.removeprefix(".").removesuffix(_WRITING) if unfinished else path.name)
        if version is None or version.model != newest.model or version.epoch > newest.epoch:
            continue
        if unfinished:
            removed.append(path)
        else:
            versions.append((version, path))
    if keep is not None:
        removed += [path for _, path in sorted(versions)[:-keep]]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return sorted(path.name for path in removed)


def _version(name: str) -> Version | None:
    try:
        return Version.parse(name)
    except RecordError:
        return None
