"""The distributed checkpoint service: manifests, chunks, transports and receivers. Knows nothing of rollouts."""
