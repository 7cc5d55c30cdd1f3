"""Each refusal names the line, what was found, what was expected and the remedy; all come at once; none shows a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.configs.errors import ConfigError, SecretError
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig
from physarum.configs.secrets import is_secret_key, is_secret_variable, read_secret
from physarum.configs.suggest import known_keys, nearest, suggest_key

SFT = """\
run: {name: sft}
model: {path: start}
source: {hook: "calculator:source"}
trainer: {objective: sft, lr: 3e-3}
stop: {steps: 10}
"""


def refuse(folder: Path, text: str, words: list[str] | None = None) -> list[str]:
    path = folder / "c.yaml"
    path.write_text(SFT + text)
    with pytest.raises(ConfigError) as caught:
        resolve(path, parse_command_line(words or []))
    return [str(problem) for problem in caught.value.problems]


def test_the_base_of_these_tests_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(SFT)
    assert resolve(tmp_path / "c.yaml").trainer.objective == "sft"


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run:\n  name: Bad Name\n  sed: 1\ntrainer:\n  lr: fast\n  ranks: 1.5\n  tp: 0\nsupervsor: {}\n")
    with pytest.raises(ConfigError) as caught:
        resolve(path)
    messages = "\n".join(str(problem).replace(str(tmp_path), "") for problem in caught.value.problems)
    for expected in (
        "c.yaml:2: run.name: found 'Bad Name' (text); expected text that matches ^[a-z0-9-]{1,32}$",
        "c.yaml:3: run.sed: found unknown key `sed`; expected a key of run. Remedy: did you mean `run.seed`.",
        "c.yaml:4: trainer.objective: found nothing; expected the key `trainer.objective`",
        "c.yaml:5: trainer.lr: found 'fast' (text); expected a number. Remedy: write a number at `trainer.lr`.",
        "c.yaml:6: trainer.ranks: found 1.5 (number); expected a whole number",
        "c.yaml:7: trainer.tp: found 0 (number); expected a number of at least 1",
        "c.yaml:8: supervsor: found unknown key `supervsor`; expected a key of the top level",
        "Remedy: did you mean `supervisor`.",
        "c.yaml:1: model: found nothing",
        "c.yaml:1: stop: found nothing",
    ):
        assert expected in messages, f"{expected}\nnot in\n{messages}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("megatron: {a: 1}\n", "unknown key `megatron`; expected a key of the top level. Remedy: move these fields under"),
        ("sglang: {a: 1}\n", "Remedy: move these arguments under `engines.<group>.sglang:`"),
        ("lr: 1\n", "Remedy: did you mean `trainer.lr`"),
        ("engines: {policy: {cuont: 1}}\n", "a key of engines.policy. Remedy: did you mean `engines.policy.count`"),
        ("engines: {Policy: {}}\n", "engines.Policy: found 'Policy' (text); expected text that matches"),
        ("engines: {policy: {pause: abort}}\n", "expected 'retract' or 'in_place'"),
        ("age: {admission: paced}\n", "found 'paced' (text); expected 'pace', 'count' or 'free'"),
        ("age: {consumption: skip}\n", "expected 'mask', 'drop', 'wait' or 'train'"),
        ("rollout: {sampling: {temperature: 0}}\n", "found 0 (number); expected a number above 0"),
        ("rollout: {generate: nonsense}\n", "found 'nonsense' (text); expected a hook, `package.module:attribute`"),
        ("reward: {gpus: [0, 0]}\n", "expected a number of devices, or a list of distinct device indices"),
        ("reward: {gpus: true}\n", "expected a number of devices"),
        ("reward: {env: {lower: 1}}\n", "found variable 'lower'; expected variable names of A-Z"),
        ("reward: {env: {DEBUG: true}}\n", 'Remedy: quote the value: `DEBUG: "..."`'),
        ("bus: {url: 'nats//x'}\n", "expected a URL such as nats://host:4222"),
        ("engines: {a: {url: 'nats://x'}}\n", "expected a URL such as http://host:30000"),
        ("evaluation: {problems: 4}\n", "found none of them; expected exactly one of `hook`, `data`, `environment`"),
        ("bus: {port: '80'}\n", "found '80' (text); expected a whole number"),
        ("bus: {port: 70000}\n", "expected a number of at most 65535"),
        ("reward: 3\n", "reward: found 3 (number); expected a mapping"),
        ("checkpoint: {mirror: 7}\n", "found 7 (number); expected the URL of a folder in an object store"),
        ("checkpoint: {mirror: bucket/prefix}\n", "Remedy: name the scheme, the bucket and a prefix, for example s3://"),
        ("checkpoint: {mirror: 's3://'}\n", "found 's3://' (text); expected the URL of a folder"),
        ("checkpoint: {mirror: 'simplecache::s3://b/c'}\n", "expected the URL of a folder in an object store"),
        ("checkpoint: {mirror: 'memory://b/c'}\n", "expected a store that outlives its process"),
        ("checkpoint: {token_env: lower}\n", "expected text that matches ^[A-Z_]"),
    ],
)  # fmt: skip
def test_one_wrong_value_gives_one_clear_message(tmp_path: Path, text: str, expected: str) -> None:
    messages = refuse(tmp_path, text)
    assert len(messages) == 1, messages
    assert expected in messages[0]
    assert f"{tmp_path}/c.yaml:6: " in messages[0]


def test_a_branch_is_not_a_pinned_revision(tmp_path: Path) -> None:
    messages = refuse(tmp_path, "", ["model.hub={id: org/tiny, revision: main}"])
    assert "command line: model.hub.revision: found 'main' (text); expected a tag, or a commit" in messages[0]
    messages = refuse(tmp_path, "", ["model.hub={id: org/tiny}"])
    assert "model.hub.revision: found nothing" in messages[0]


def test_stop_needs_a_condition(tmp_path: Path) -> None:
    assert (
        "at least one of `steps`, `samples`, `epochs`, `time_s`, `loss_below`, `reward_above`"
        in refuse(tmp_path, "", ["stop.steps=null"])[0]
    )


@pytest.mark.parametrize(
    "text",
    [
        "bus: {token: hunter2}\n",
        "bus: {password: hunter2}\n",
        "bus: {token_env: hunter2}\n",
        "bus: {url: 'nats://me:hunter2@host'}\n",
        "reward: {env: {HF_TOKEN: hunter2}}\n",
        "checkpoint: {mirror: 's3://me:hunter2@bucket/prefix'}\n",
        "engines: {policy: {sglang: {api-key: hunter2}}}\n",
        "extra: {judge: {api_key: hunter2}}\n",
        "reward: {args: {password: hunter2}}\n",
    ],
)
def test_a_secret_is_refused_and_never_shown(tmp_path: Path, text: str) -> None:
    message = "\n".join(refuse(tmp_path, text))
    assert "hunter2" not in message
    assert "c.yaml:6: " in message
    assert "Remedy: " in message


def test_a_secret_on_the_command_line_is_not_shown(tmp_path: Path) -> None:
    message = refuse(tmp_path, "", ["bus.token=hunter2"])[0]
    assert message.startswith("command line: bus.token: found unknown key `token`")
    assert "`token_env: VARIABLE`" in message
    assert "hunter2" not in message


def test_names_of_secrets_are_told_from_other_names() -> None:
    assert is_secret_key("admin-api-key")
    assert not is_secret_key("tokens_per_microbatch")
    assert not is_secret_key("token_env")
    assert is_secret_variable("AWS_SECRET_ACCESS_KEY")
    assert is_secret_variable("OPENAI_APIKEY")
    assert not is_secret_variable("TOKENIZERS_PARALLELISM")
    assert not is_secret_variable("NCCL_CUMEM_ENABLE")


def test_an_unset_secret_names_its_variable() -> None:
    assert read_secret(None) is None
    assert read_secret("BUS", {"BUS": "x"}) == "x"
    with pytest.raises(SecretError, match="environment variable BUS: found no value"):
        read_secret("BUS", {"BUS": ""})


def test_suggestions_come_from_the_schema() -> None:
    assert nearest("mem_fraction", ["mem-fraction-static", "port"]) == "mem-fraction-static"
    assert nearest("zzz", ["port"]) is None
    assert suggest_key(RootConfig, ("trainer", "algorithm", "clip_hi")) == "trainer.algorithm.clip_high"
    assert suggest_key(RootConfig, ("dual_clip",)) == "trainer.algorithm.dual_clip"
    assert suggest_key(RootConfig, ("lr",)) == "trainer.lr", "the critic's lies deeper"
    assert "engines.<group>.sglang" in set(known_keys(RootConfig))
