"""Engines are named after their group; names that other actors have are no groups'."""

from __future__ import annotations

from physarum.actors import roles
from physarum.actors.engine.nodes import name_of
from physarum.actors.policies import trainer_instance
from physarum.actors.supervising import SUPERVISOR
from physarum.configs.instance_names import ROLES, is_taken


def test_every_role_is_known() -> None:
    assert set(ROLES) == {*roles.ROLES, SUPERVISOR}


def test_composed_names_are_known() -> None:
    for instance in (trainer_instance("solver"), name_of("policy-0", 1), "router-policy-0"):
        assert is_taken(instance.rpartition("-")[0]), instance
    assert not any(map(is_taken, ("policy", "judge-2", "trainers", "node-a", "policy-node")))
