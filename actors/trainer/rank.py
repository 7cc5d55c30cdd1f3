"""The process of ranks 1 to N - 1: do what rank 0 says until it closes.

Invariant: it never outlives its parent: the kernel kills it with the parent's thread that started it, and the end of
its standard input ends it.
"""

import logging
import sys

import msgspec

from physarum.actors.parent import die_with_parent
from physarum.actors.trainer.world_config import WorldConfig

logger = logging.getLogger(__name__)


class RankSettings(msgspec.Struct, frozen=True):
    """First line of standard input, JSON."""

    config: WorldConfig
    rank: int
    port: int
    parent: int


def main() -> None:
    """Entry point of `python -m physarum.actors.trainer.rank`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankSettings)
    die_with_parent(settings.parent, sys.stdin.buffer)
    from physarum.actors.trainer.serve import serve  # imports torch and megatron, after the parent's death is watched

    serve(settings.config, settings.rank, settings.port)


if __name__ == "__main__":
    main()
