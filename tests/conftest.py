"""Fixtures and settings that several folders of tests share."""

from hypothesis import settings

pytest_plugins = ["bus_fixture", "engine_fixture"]

# A deadline per example fails on a busy machine, not on wrong code.
settings.register_profile("physarum", deadline=None, derandomize=True)
settings.load_profile("physarum")
