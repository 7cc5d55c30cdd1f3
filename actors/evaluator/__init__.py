"""Scores pinned versions on held-out problems, outside the account."""
