"""Keeps weight versions and serves their chunks."""
