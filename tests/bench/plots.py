"""Plots of the benchmarks' results. matplotlib is no dependency: without it a plot is not drawn, and the log says so."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


def draw_b1(result: Mapping[str, Any], target: Path) -> str | None:
    """Seconds per step of the three ways to train, and the limit; the file's name, or None."""
    plt = _pyplot(target)
    if plt is None:
        return None
    names = ["sync", "one step off", f"K = {result['k']}"]
    seconds = [result["sync_step_s"], result["one_step_off_step_s"], result["step_s"]]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.bar(names, seconds, color=["#999999", "#bbbbbb", "#2a7f62"])
    axes.axhline(result["limit_s"], color="black", linestyle="--", label=f"limit {result['limit_s']:.0f} s")
    axes.set_ylabel("seconds per step (model)")
    axes.set_title("Long-tail generation, balanced trainer")
    axes.legend()
    return _saved(plt, figure, target)


def draw_b2(rows: Sequence[Mapping[str, Any]], target: Path) -> str | None:
    """Trained tokens per second and masked share by K; the file's name, or None."""
    plt = _pyplot(target)
    if plt is None:
        return None
    bounds = [row["k"] for row in rows]
    figure, (rates, shares) = plt.subplots(1, 2, figsize=(10, 4))
    for field, label in (
        ("trained_tokens_per_s", "count + mask"),
        ("strict_fifo_trained_tokens_per_s", "strict FIFO"),
        ("wait_trained_tokens_per_s", "wait"),
    ):
        rates.plot(bounds, [row[field] for row in rows], marker="o", label=label)
    rates.set_xlabel("age bound K")
    rates.set_ylabel("trained tokens per second (model)")
    rates.legend()
    for field in ("tokens_masked_share", "tail_share_samples", "tail_share_tokens", "length_ratio"):
        shares.plot(bounds, [row[field] for row in rows], marker="o", label=field)
    shares.set_xlabel("age bound K")
    shares.legend()
    return _saved(plt, figure, target)


def _pyplot(target: Path) -> Any:
    if importlib.util.find_spec("matplotlib") is None:
        _log.warning(
            "%s is not drawn: matplotlib is not installed; pip install matplotlib, then run again", target.name
        )
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _saved(plt: Any, figure: Any, target: Path) -> str:
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return target.name
