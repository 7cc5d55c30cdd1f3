"""`run:` names a run and says where its folder lies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from physarum.configs.machines import HEAD
from physarum.configs.types import Name, Natural, Seconds, Section

AT: Final = "@"
"""Between a run's name and a machine's: neither may hold it."""


class RunConfig(Section):
    """Identity of a run. Its files lie in `root/name`; `root` is relative to the working directory."""

    name: Name
    root: Path = Path("runs")
    seed: Natural = 0
    share_gpus: bool = False
    """Groups may list the same device in `gpus` and share it; give the engine its part of the memory."""
    orphan_timeout_s: Seconds = 1800.0
    """Actors that no supervisor has claimed for this long drain and stop."""

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.root / self.name

    def folder_on(self, machine: str | None) -> Path:
        """That of one machine's part: beside the run's own folder, which is the head's, so that machines may share a root."""
        return self.folder if machine in (None, HEAD) else self.root / f"{self.name}{AT}{machine}"
