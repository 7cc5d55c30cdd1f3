"""What `actorctl`'s ledger, dead, replay, export, import, checkpoints and fork commands are made of."""
