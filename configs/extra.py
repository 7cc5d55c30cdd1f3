"""The user's own keys under `extra:`, read with the schema of the hook that uses them."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from physarum.configs.errors import ConfigError
from physarum.configs.problems import schema_problems
from physarum.configs.root import RootConfig

ModelT = TypeVar("ModelT", bound=BaseModel)


def typed_extra(config: RootConfig, model: type[ModelT], key: str) -> ModelT:
    """`extra.<key>` as `model`; a key that is not written counts as empty, so that the model's defaults apply.

    Raises ConfigError with the line of every value that the model refuses.
    """
    try:
        return model.model_validate(config.extra.get(key, {}))
    except ValidationError as error:
        raise ConfigError(schema_problems(error, model, config.origins, ("extra", key))) from None
