"""What the supervisor decides when an actor's process ends."""

from __future__ import annotations

import signal

import pytest

from physarum.actors.errors import EXIT_UNRECOVERABLE
from physarum.actors.supervisor.policy import Exit, GiveUp, LeaveEnded, Restart, RestartPolicy
from physarum.configs.supervisor import SupervisorConfig

FAILED = Exit(1)


def policy(**settings: float) -> RestartPolicy:
    defaults = {"max_restarts": 5, "window_s": 300.0, "backoff_s": 0.5, "backoff_max_s": 30.0}
    return RestartPolicy(SupervisorConfig.model_validate({**defaults, **settings}))


def after(one: RestartPolicy, ended: Exit = FAILED, *, ready: bool = True, finished: bool = False, now: float = 0.0):  # noqa: ANN201
    return one.after_exit(ended, ready=ready, finished=finished, now=now)


def test_backoff_doubles_up_to_its_bound() -> None:
    one = policy(max_restarts=6, backoff_max_s=5.0)
    assert [after(one, now=float(n)) for n in range(6)] == [Restart(s) for s in (0.5, 1.0, 2.0, 4.0, 5.0, 5.0)]


def test_more_restarts_than_allowed_within_the_window_is_a_named_failure() -> None:
    one = policy(max_restarts=2)
    after(one, now=0.0)
    after(one, now=100.0)
    decision = after(one, now=200.0)
    assert decision == GiveUp("ended with status 1 after 2 restarts within 300 s (supervisor.max_restarts is 2)")


def test_restarts_outside_the_window_are_forgiven_and_backoff_begins_anew() -> None:
    one = policy(max_restarts=2)
    after(one, now=0.0)
    after(one, now=1.0)
    assert after(one, now=302.0) == Restart(0.5)
    assert one.restarts == 3


def test_an_unrecoverable_status_ends_the_run_at_once() -> None:
    decision = after(policy(), Exit(EXIT_UNRECOVERABLE))
    assert isinstance(decision, GiveUp)
    assert "status 78" in decision.reason


def test_two_failures_without_ever_being_ready_end_the_run() -> None:
    one = policy()
    assert after(one, ready=False) == Restart(0.5)
    assert after(one, ready=False) == GiveUp("ended with status 1, for the second time without ever having been ready")


def test_an_actor_that_was_ready_once_may_fail_at_start_later() -> None:
    one = policy()
    after(one, ready=True)
    after(one, ready=False)
    assert isinstance(after(one, ready=False), Restart)


@pytest.mark.parametrize("ended", [Exit(0), Exit(None)])
def test_an_actor_that_announced_that_it_is_finished_is_left_ended(ended: Exit) -> None:
    assert after(policy(), ended, finished=True) == LeaveEnded()


def test_an_exit_of_zero_without_an_announcement_is_restarted() -> None:
    assert after(policy(), Exit(0)) == Restart(0.5)


def test_a_finished_actor_that_ends_with_an_error_is_restarted() -> None:
    assert after(policy(), Exit(1), finished=True) == Restart(0.5)


def test_no_restart_allowed_fails_at_the_first_exit() -> None:
    assert isinstance(after(policy(max_restarts=0)), GiveUp)


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (Exit(3), "ended with status 3"),
        (Exit(-signal.SIGKILL), "was killed by SIGKILL"),
        (Exit(-99), "was killed by signal 99"),
        (Exit(None), "ended (adopted from another supervisor, so its exit status is not known)"),
    ],
)
def test_an_exit_reads_as_words(ended: Exit, text: str) -> None:
    assert str(ended) == text
