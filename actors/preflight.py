"""Everything that can be known to be wrong before a process starts: the checks of the configuration, and what actors know.

Invariant: as `physarum.configs.checks`: no process is started, and every problem is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from physarum.configs.checks import check as check_config
from physarum.configs.errors import Problem, Severity
from physarum.configs.origin import KeyPath
from physarum.configs.root import RootConfig
from physarum.weightsync.errors import QuantisationError
from physarum.weightsync.quantisation.plan import Quantisation


def check(config: RootConfig) -> list[Problem]:
    """Every problem of a run about to start on this host, errors first."""
    problems = [*check_config(config), *_quantisation(config)]
    return sorted(problems, key=lambda problem: problem.severity)


def _quantisation(config: RootConfig) -> Iterator[Problem]:
    """Versions can be quantised as the folders say that engines start from."""
    folders: dict[KeyPath, Path | None] = {("model", "path"): config.model.path}
    folders |= {("engines", name, "quantised_model"): one.quantised_model for name, one in config.engines.items()}
    for key, folder in folders.items():
        if folder is None or not (folder / "config.json").is_file():
            continue
        try:
            Quantisation.in_folder(folder)
        except QuantisationError as error:
            remedy = "quantise the model in a supported way (actorctl checkpoints export-hf --quant)"
            yield Problem(
                Severity.ERROR, config.origins.where(key), str(error), "a form that versions can take", remedy
            )
