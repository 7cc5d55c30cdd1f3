"""The command line of the stub, by the same class that describes it."""

from __future__ import annotations

import argparse


class RouterArgs:
    """Named as in sglang-router."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--host", default="")
        parser.add_argument("--port", type=int, default=0)
        parser.add_argument("--prometheus-port", type=int, default=29000)
        parser.add_argument("--policy", choices=["random", "round_robin", "cache_aware"], default="cache_aware")
