"""A run with a `reward:` section of the test's own; the section begins on line 8 of `c.yaml`."""

from __future__ import annotations

from pathlib import Path

from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig

RECIPE = """\
run: {name: quick}
model: {path: start}
source: {hook: "calculator:source"}
rollout: {generate: "calculator:generate"}
engines: {policy: {}}
trainer: {objective: rl, lr: 1e-4}
stop: {steps: 10}
reward:
"""


def load(folder: Path, reward: str, *words: str) -> RootConfig:
    path = folder / "c.yaml"
    path.write_text(RECIPE + "".join(f"  {line}\n" for line in reward.splitlines()))
    return resolve(path, parse_command_line(words))
