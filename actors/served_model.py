"""In which form a run's versions are published: that of the model folder from which the engines start.

Invariant: trainer, engines and the area of a run read the same folder, so a version has the names, shapes and types that its
engines hold.
"""

from __future__ import annotations

from pathlib import Path

from physarum.actors.context import RunFolder
from physarum.actors.errors import UnrecoverableError
from physarum.configs.root import RootConfig
from physarum.weightsync.errors import QuantisationError
from physarum.weightsync.quantisation.plan import Quantisation


def served_model(folder: RunFolder, config: RootConfig) -> Path:
    """The policy's start model, or its quantised form (`engines.GROUP.quantised_model`, equal in all groups that follow it)."""
    forms = (group.quantised_model for group in config.following.values())
    return next((one for one in forms if one is not None), folder.start_model)


def served_quantisation(folder: RunFolder, config: RootConfig) -> Quantisation | None:
    """How versions are quantised; None: not at all. Raises UnrecoverableError for what is not supported. Blocking."""
    try:
        return Quantisation.in_folder(served_model(folder, config).resolve())
    except QuantisationError as error:
        raise UnrecoverableError(f"versions cannot be quantised as the engines' model is: {error}") from error
