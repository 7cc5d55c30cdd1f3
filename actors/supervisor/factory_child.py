"""Runs one `model.factory` hook: `python -m physarum.actors.supervisor.factory_child HOOK FOLDER ARGS_JSON`.

A process of its own, so that what the hook imports (torch) does not stay in the supervisor for the length of the run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from physarum.configs.errors import HookError
from physarum.configs.hooks import check_signature, load_hook


def main(arguments: list[str]) -> int:
    hook, folder, text = arguments
    args = json.loads(text)
    try:
        factory = load_hook(hook)
        check_signature(factory, ["folder"], hook, args)
    except HookError as error:
        sys.stderr.write(f"{error}\n")
        return 78
    factory(Path(folder), **args)  # type: ignore[operator]  # checked to be callable by check_signature
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
