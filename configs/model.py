"""`model:` the policy to train: from a folder, a hub, a factory hook, or the run of another configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

from physarum.configs.hooks import Hook
from physarum.configs.types import Arguments, Dtype, Name, Section, VariableName, refuse, require_exactly_one


def _pinned(revision: str) -> str:
    if revision.lower() in ("main", "master", "head"):
        raise refuse("a tag, or a commit of 40 hexadecimal digits", "pin the revision: a branch moves under the run")
    return revision


class HubConfig(Section):
    """A repository of a model hub, pinned: a tag or a full commit, never a branch that moves."""

    id: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    revision: Annotated[str, Field(pattern=r"^[\w./-]+$"), AfterValidator(_pinned)]
    """A tag, or a commit of 40 hexadecimal digits."""
    cache_dir: Path | None = None
    """Null: the hub library's own cache (HF_HUB_CACHE)."""
    offline: bool = False
    """Use the cache only and open no connection."""
    token_env: VariableName | None = None


class FactoryConfig(Section):
    """A hook `(folder, **args)` that fills an empty folder with a model in Hugging Face form; its result is cached."""

    hook: Hook
    args: Arguments = Field(default_factory=dict)


class ModelConfig(Section):
    """Exactly one of `path`, `hub`, `factory`, `made_by` says where the start model comes from."""

    alternatives: ClassVar[tuple[str, ...]] = ("path", "hub", "factory", "made_by")

    path: Path | None = None
    """A Hugging Face folder: config.json, weights, tokenizer."""
    hub: HubConfig | None = None
    factory: FactoryConfig | None = None
    made_by: Path | None = None
    """A configuration whose run makes the model, cached by that configuration's digest."""
    dtype: Dtype = "float32"
    name: Name = "policy"
    """The model's name in version labels (`policy@3.128`)."""

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        require_exactly_one(self, self.alternatives)
        return self
