"""`python -m physarum.actors.actorctl` is `actorctl`."""

from physarum.actors.actorctl.main import main

main()
