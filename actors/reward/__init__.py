"""Scores executions in isolated worker processes."""
