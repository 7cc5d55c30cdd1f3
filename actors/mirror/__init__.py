"""Checkpoints in an object store: copied there beside training, compared, and brought back."""
