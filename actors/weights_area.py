"""Where the versions of a run are on this host: every actor here finds the same place by itself."""

from __future__ import annotations

from typing import Final

from physarum.actors.context import RunFolder
from physarum.actors.served_model import served_model
from physarum.configs.root import RootConfig
from physarum.weightsync.area import SharedArea
from physarum.weightsync.layout import forms_in

_ON_THE_WAY: Final = 2
"""Versions beyond those that are kept: one that is written, one whose memory is used again."""


def weights_area(folder: RunFolder, config: RootConfig, only_look: bool = False) -> SharedArea:
    """One for all policies. The size of the models that engines start from says whether memory can hold what is kept; a host
    without one holds no version either. With `only_look` nothing is made where nothing is. Blocking. Raises ManifestError for
    a model that cannot be read.
    """
    models = [served_model(folder.of_policy(view.policy), view) for view in config.views()]
    forms = [form for model in models if model.exists() for form in forms_in(model.resolve()).values()]
    model_bytes = sum(form.size_bytes for form in forms)
    return SharedArea.of_run(folder.path, model_bytes, config.checkpoint.keep_last + _ON_THE_WAY, only_look)
