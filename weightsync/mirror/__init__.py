"""Versions in an object store: copied there beside the run, and read from there by whoever reaches the store alone."""
