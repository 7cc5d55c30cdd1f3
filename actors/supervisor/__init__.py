"""Starts, watches, restarts and stops the actors of one machine."""
