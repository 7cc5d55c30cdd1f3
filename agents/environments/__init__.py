"""Environments that make their own tasks and judge what became of them."""
