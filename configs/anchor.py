"""Relative paths made absolute.

Invariant: a path or hook file starts from the folder of the configuration that names it; on the command line, in a
default, and for `run.root` (what a run writes) from the working directory. `~` is the home folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from physarum.configs.hooks import Hook
from physarum.configs.origin import KeyPath, Origins
from physarum.configs.root import RootConfig
from physarum.configs.types import Section

_FROM_WORKING_DIRECTORY: frozenset[KeyPath] = frozenset({("run", "root")})
SectionT = TypeVar("SectionT", bound=Section)


def anchor_paths(config: RootConfig, origins: Origins) -> RootConfig:
    """The configuration with every path and every hook file absolute."""
    return _section(config, (), origins)


def _section(section: SectionT, key: KeyPath, origins: Origins) -> SectionT:
    changed = {name: _value(getattr(section, name), (*key, name), origins) for name in type(section).model_fields}
    return section.model_copy(update=changed)


def _value(value: object, key: KeyPath, origins: Origins) -> object:
    if isinstance(value, Section):
        return _section(value, key, origins)
    if isinstance(value, Hook):
        return value.anchored(_folder(key, origins))
    if isinstance(value, Path):
        return Path(os.path.abspath(_folder(key, origins) / value.expanduser()))
    if isinstance(value, tuple):
        return tuple(_value(item, (*key, index), origins) for index, item in enumerate(value))
    if isinstance(value, dict):
        return {name: _value(item, (*key, name), origins) for name, item in value.items()}
    return value


def _folder(key: KeyPath, origins: Origins) -> Path:
    origin = None if key in _FROM_WORKING_DIRECTORY else origins.nearest(key)
    return Path.cwd() if origin is None else origin.folder
