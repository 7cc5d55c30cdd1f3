"""What an ended world leaves behind: nothing that another one would add to."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from physarum.actors.trainer.errors import WorldClosed
from physarum.actors.trainer.world import World
from physarum.actors.trainer.world_config import WorldConfig
from physarum.agents.calculator.model import build

pytestmark = pytest.mark.timeout(120)


def test_ended_worlds_keep_no_thread_awake_and_no_descriptor_open(tmp_path: Path) -> None:
    """Each process group has threads that poll: some tens of worlds later they took most of a core."""
    build(tmp_path, seed=0)
    process, left = psutil.Process(), []
    for _ in range(3):
        world = World.start(WorldConfig(hf_folder=str(tmp_path), objective="sft", lr=1e-3))
        world.close()
        with pytest.raises(WorldClosed):
            world.step([])
        left.append((process.num_threads(), process.num_fds()))
    (threads, descriptors), (threads_before, descriptors_before) = left[2], left[1]
    assert threads <= threads_before
    assert descriptors <= descriptors_before
