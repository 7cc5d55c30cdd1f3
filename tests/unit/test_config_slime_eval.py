"""slime's evaluation files become sets, key by key; what has no counterpart is refused by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.configs.errors import ConfigError
from physarum.configs.evaluation import EvaluationConfig
from physarum.configs.loader import resolve

RUN = """\
extends: eval.yaml
run: {name: r}
model: {path: m}
source: {data: x.jsonl}
rollout: {generate: "physarum.agents.single_turn:generate"}
reward: {hook: "physarum.agents.calculator.reward:exact_match"}
engines: {policy: {}}
evaluation: {every_versions: 20}
trainer: {objective: rl, lr: 1.0}
stop: {steps: 1}
"""
EVAL = """\
eval:
  defaults:
    max_response_len: 4096
    top_p: 0.7
  datasets:
    - name: AIME_2024
      path: data/aime.jsonl@[0:30]
      rm_type: deepscaler
      n_samples_per_eval_prompt: 6
      temperature: 0
    - name: gpqa
      path: /data/gpqa.parquet
      input_key: question
      label_key: answer
      top_p: 1.0
      metadata_overrides: {split: test}
"""


def evaluation(folder: Path, text: str = EVAL) -> EvaluationConfig:
    (folder / "eval.yaml").write_text(text)
    (folder / "run.yaml").write_text(RUN)
    found = resolve(folder / "run.yaml").evaluation
    assert found is not None
    return found


def test_data_sets_become_sets_over_the_defaults(tmp_path: Path) -> None:
    found = evaluation(tmp_path)
    assert found.every_versions == 20
    sets = found.named()
    aime, gpqa = sets["aime-2024"], sets["gpqa"]
    assert aime.data == (tmp_path / "data" / "aime.jsonl@[0:30]",), "from the folder of the file that names it"
    assert gpqa.data == (Path("/data/gpqa.parquet"),)
    assert (aime.samples, aime.pass_at, aime.problems, gpqa.samples, gpqa.pass_at) == (6, (1, 2, 4), None, 1, ())
    assert aime.sampling is not None and gpqa.sampling is not None
    assert (aime.sampling.top_k, aime.sampling.top_p, aime.sampling.max_new_tokens) == (1, 0.7, 4096)
    assert (gpqa.sampling.top_p, gpqa.sampling.temperature) == (1.0, 1.0)
    assert aime.columns is None and gpqa.columns is not None
    assert (gpqa.columns.prompt, gpqa.columns.label) == ("question", "answer")
    assert (aime.metadata, gpqa.metadata) == ({"rm_type": "deepscaler"}, {"split": "test"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            EVAL + "      custom_rm_path: my.rm\n",
            r"eval\.yaml:17: eval\.datasets\.1\.custom_rm_path: found `custom_rm_path`",
        ),
        (EVAL.replace("top_p: 0.7", "min_samples: 3"), r"eval\.yaml:4: eval\.defaults\.min_samples: found"),
        (
            "eval: {datasets: [{name: AIME_24, path: a}, {name: aime-24, path: b}]}\n",
            r"found `aime-24`, which is `evaluation\.sets\.aime-24` as another one is",
        ),
        ("eval: {datasets: []}\n", "found no list `eval.datasets`"),
        ("eval: {datasets: [{name: a}]}\n", "a data set without `name` or `path`"),
        (EVAL.replace("prompt: 6", "prompt: six"), r"eval\.yaml:6: evaluation\.sets\.aime-2024\.samples"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluation(tmp_path, text)
