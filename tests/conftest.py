"""Fixtures that several folders of tests share."""

pytest_plugins = ["bus_fixture", "engine_fixture"]
