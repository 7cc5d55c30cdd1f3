"""An actor process whose role "trainer" is the one without torch: `python -m ... RUN_FOLDER ROLE INSTANCE`."""

from __future__ import annotations

import sys

from physarum.actors import roles
from physarum.actors.main import main

if __name__ == "__main__":
    roles.ROLES["trainer"] = "tests.bench.null_trainer:NullTrainer"
    sys.exit(main(sys.argv[1:]))
