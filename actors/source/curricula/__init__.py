"""Ready-made curricula; each is a hook for `source.curriculum`."""

from physarum.actors.source.curricula.difficulty_window import DifficultyWindow, Places
from physarum.actors.source.curricula.stages import Stages

__all__ = ["DifficultyWindow", "Places", "Stages"]
