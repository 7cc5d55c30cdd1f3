"""The summary of a finished run, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from physarum.actors.display.text import amount, duration, number


def summary_rows(name: str, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) for each line; what was not measured is '-'."""
    account, setup = summary["account"], summary["setup_seconds"]
    cached = " (cached)" if setup.get("sft_cached") else ""
    seconds = summary["seconds"]
    return [
        ("run", name),
        ("held-out reward", f"{number(summary['reward_start'])} -> {number(summary['reward_end'])}"),
        ("steps, versions published", f"{summary['steps']}, {_plain(summary['versions'])}"),
        ("training time", "-" if seconds is None else duration(seconds)),
        ("set-up: start model, engine", f"{_seconds(setup['sft'])}{cached}, {_seconds(setup['engine_start'])}"),
        ("tokens generated, trained", f"{_amount(summary['tokens_generated'])}, {_amount(summary['tokens_trained'])}"),
        ("tokens interrupted, replayed", _replayed(summary.get("replay", {}))),
        ("trainer waited", _share(summary["trainer_wait_share"])),
        ("engines generating", _share(summary["overlap_share"])),
        ("oldest trained token", f"age {_plain(summary['max_trained_age'])} (bound {summary['age_bound']})"),
        ("samples of several versions", _plain(summary["multi_version_samples"])),
        ("weight-update pause p50, p99", f"{_seconds(summary['pause_p50_s'])}, {_seconds(summary['pause_p99_s'])}"),
        ("weight updates by transport", _counts(summary["weight_updates"])),
        ("model", _plain(summary["model_dir"])),
        ("account", account_line(account)),
        *(row for policy, one in summary.get("policies", {}).items() for row in _policy_rows(policy, one)),
    ]


def _policy_rows(name: str, found: dict[str, Any]) -> list[tuple[str, str]]:
    """Of a further policy."""
    reward, oldest, tokens = (
        number(found["reward_mean_last"]),
        _plain(found["max_trained_age"]),
        found["tokens_trained"],
    )
    done = f"{found['steps']} steps, reward {reward}, {_amount(tokens)} tokens trained, oldest of age {oldest}"
    account = account_line(found["account"])
    return [(name, done), (f"{name}: model", _plain(found["model_dir"])), (f"{name}: account", account)]


def _replayed(replay: dict[str, dict[str, int]]) -> str:
    """In all, and the kinds of interruption with what was prefilled again for each (agents/replay.py)."""
    if not replay:
        return "none"
    interrupted, replayed = (sum(one[name] for one in replay.values()) for name in ("interrupted", "replayed"))
    kinds = ", ".join(f"{kind} {one['times']}x: {_amount(one['replayed'])}" for kind, one in replay.items())
    return f"{_amount(interrupted)}, {_amount(replayed)} ({kinds})"


def account_line(account: dict[str, Any]) -> str:
    """The account's equation with its numbers."""
    terms = " + ".join(f"{account[name]} {name.replace('_', ' ')}" for name in _TERMS)
    return f"{account['issued']} issued = {terms}; imbalance {account['imbalance']}"


def print_rows(console: Console, rows: list[tuple[str, str]]) -> None:
    """A table on a terminal, `label: value` lines elsewhere."""
    if console.is_terminal:
        table = Table(box=None, show_header=False)
        for label, value in rows:
            table.add_row(f"[dim]{label}", value)
        console.print(table)
        return
    for label, value in rows:
        console.print(f"{label}: {value}", markup=False, highlight=False, soft_wrap=True)


_TERMS = ("trained", "masked", "dropped", "dead", "in_flight")


def _plain(value: object) -> str:
    return "-" if value is None else str(value)


def _amount(value: float | None) -> str:
    return "-" if value is None else amount(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _counts(values: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in values.items()) or "-"
