"""Where rows come from, and which of their keys hold what: common to `source:`, `evaluation:` and the parts of a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field, model_validator

from physarum.configs.data_entries import check_entries
from physarum.configs.hooks import Hook
from physarum.configs.types import Arguments, Files, Section, require_exactly_one

ENVIRONMENT_TRAINING: Final = Hook("physarum.agents.environments.reasoning_gym:Problems")
ENVIRONMENT_HELD_OUT: Final = Hook("physarum.agents.environments.reasoning_gym:HeldOut")


class ColumnsConfig(Section):
    """The keys of a row of a file that hold a task's parts (`a.b`: the key b of a mapping a). Only `prompt` must be present in
    every row. Tools and what is attached go into the metadata, under the names that they have here."""

    prompt: str = "prompt"
    """A text, or a list of messages."""
    label: str = "label"
    metadata: str = "metadata"
    """A mapping."""
    tools: str = "tools"
    """Function schemas for the chat template: a list, or its JSON text."""
    images: str = "images"
    videos: str = "videos"
    audios: str = "audios"
    """Attachments, as the file has them (paths, URLs, data): nothing is opened or decoded on the way to the agent."""


class ChatConfig(Section):
    """How agents/chat.py renders prompts; it travels with each task, so hosts of rollout workers need `template` too."""

    system_prompt: str | None = None
    """Put before a prompt that brings none."""
    template: Path | None = None
    """A Jinja file; null takes the tokenizer's own."""
    template_kwargs: Arguments = Field(default_factory=dict)
    """What the template itself knows, such as `enable_thinking: false`."""


class EnvironmentConfig(Section):
    """A generator of verifiable problems, as reasoning_gym.create_dataset takes it; its rows follow `run.seed`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]
    args: Arguments = Field(default_factory=dict)
    """`size`: problems in an epoch (500); the others set the difficulty."""


class RowsConfig(Section):
    """Exactly one of `alternatives`. A hook is called `(seed, **args)` and returns `hooks.Rows`."""

    alternatives: ClassVar[tuple[str, ...]] = ("hook", "data", "environment")

    hook: Hook | None = None
    data: Annotated[Files, AfterValidator(check_entries)] | None = None
    """Files (JSONL, plain or packed by gzip or zstd, and Parquet), folders of them or patterns; `[a:b]` behind one: a slice."""
    environment: EnvironmentConfig | None = None
    """Problems that reasoning-gym makes (the extra `environments`)."""
    args: Arguments = Field(default_factory=dict)
    columns: ColumnsConfig | None = None
    chat: ChatConfig | None = None
    metadata: Arguments = Field(default_factory=dict)
    """Laid over the metadata of every row."""

    @model_validator(mode="after")
    def _one_origin(self) -> RowsConfig:
        require_exactly_one(self, self.alternatives)
        return self

    def row_hook(self, *, held_out: bool = False) -> tuple[Hook, Arguments] | None:
        """The hook that makes the rows and its arguments; None where they are read from files."""
        if self.environment is not None:
            chosen: Arguments = {"name": self.environment.name, "args": self.environment.args}
            return ENVIRONMENT_HELD_OUT if held_out else ENVIRONMENT_TRAINING, chosen
        return None if self.hook is None else (self.hook, self.args)
