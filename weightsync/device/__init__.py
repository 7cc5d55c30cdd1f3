"""Weights on the device of an engine or a trainer: a process of its own that holds them, and who talks to it."""
