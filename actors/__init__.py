"""What runs: the actor runtime, one package per role, the training algorithms and actorctl."""
