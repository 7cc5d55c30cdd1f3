"""`actorctl` with stub actors: the real command line, with the actors' command replaced."""

import supervisor_stub

from physarum.actors.actorctl.main import main
from physarum.actors.supervisor import supervisor

if __name__ == "__main__":
    supervisor.Supervisor.__init__.__kwdefaults__["command_for"] = supervisor_stub.command
    main()
