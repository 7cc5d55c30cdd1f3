"""The command line of the stub: what the engine actor always passes, and the stub's own latency model.

Invariant: the same parser describes the arguments (the actor asks for them) and reads them at the start.
"""

from __future__ import annotations

import argparse


class ServerArgs:
    """Named as in SGLang, since the engine actor asks it for its arguments."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for name in ("model-path", "host", "weight-version", "device", "dtype", "grammar-backend", "config", "api-key"):
            parser.add_argument(f"--{name}", default="")
        parser.add_argument("--port", type=int, default=0)
        for name in ("max-total-tokens", "max-running-requests", "context-length"):
            parser.add_argument(f"--{name}", type=int, default=0)
        parser.add_argument("--mem-fraction-static", type=float, default=0.0)
        for name in ("skip-server-warmup", "disable-cuda-graph"):
            parser.add_argument(f"--{name}", action="store_true")
        parser.add_argument("--disaggregation-mode", choices=["null", "prefill", "decode"], default="null")
        parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
        parser.add_argument("--disaggregation-transfer-backend", default="mooncake")
        for name in ("encoder-only", "language-only"):
            parser.add_argument(f"--{name}", action="store_true")
        parser.add_argument("--encoder-bootstrap-port", type=int, default=8997)
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--node-rank", type=int, default=0)
        parser.add_argument("--dist-init-addr", default="")
        parser.add_argument("--stub-step-ms", type=float, default=5.0, help="time of one decode step of all requests")
        parser.add_argument("--stub-mean-tokens", type=float, default=12.0, help="mean of the (exponential) lengths")
        parser.add_argument("--stub-log", default="", help="JSON lines: every update and every reply")
