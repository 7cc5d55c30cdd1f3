"""`python -m sglang.launch_server`, as the engine actor starts it."""

from __future__ import annotations

import argparse

from stub_server import serve

from sglang.srt.server_args import ServerArgs

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    serve(parser.parse_args())
