"""A user's function that is called at a moment of the run, with what it is given and how long it may take."""

from __future__ import annotations

from pydantic import Field

from physarum.configs.hooks import Hook
from physarum.configs.types import Arguments, Seconds, Section


class HookCall(Section):
    """`hook` is called with what the key's own description says, and `args`; after `timeout_s` it has failed."""

    hook: Hook
    args: Arguments = Field(default_factory=dict)
    timeout_s: Seconds = 60.0
