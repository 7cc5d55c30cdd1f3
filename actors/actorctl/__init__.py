"""The command line: `actorctl up`, `down`, `ps`, `logs`, `check`, `ledger`, `version`."""
