"""The scores of sets together, and in words."""

from __future__ import annotations

from collections.abc import Mapping

from physarum.actors.states import EvalScore, SetScore


def combined(label: str, sets: Mapping[str, SetScore], started_at: float, finished_at: float) -> EvalScore:
    """At least one set; each counts the same in the score, however many problems it has."""
    return EvalScore(
        version=label,
        score=sum(one.score for one in sets.values()) / len(sets),
        problems=sum(one.problems for one in sets.values()),
        scored=sum(one.scored for one in sets.values()),
        off_version=sum(one.off_version for one in sets.values()),
        started_at=started_at,
        finished_at=finished_at,
        sets=dict(sets),
    )


def described(score: SetScore) -> str:
    """One line."""
    passes = "".join(f", pass@{k} {value:.4f}" for k, value in score.pass_at.items())
    off = f", {score.off_version} of another version" if score.off_version else ""
    return f"{score.score:.4f}{passes} over {score.problems} problems x {score.samples} ({score.scored} scored{off})"
