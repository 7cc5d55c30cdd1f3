"""Files, `extends` and overrides become one configuration, and that becomes text and a digest again."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from physarum.configs.errors import ConfigError
from physarum.configs.extra import typed_extra
from physarum.configs.loader import digest, dump, resolve
from physarum.configs.overrides import Override, parse_command_line

MINIMAL = """\
run: {name: quick}
model: {path: ./start}
source: {hook: "calculator:source"}
rollout: {generate: "calculator:generate"}
reward: {hook: "./score.py:score"}
engines:
  policy: {sglang: {mem-fraction-static: 0.3}}
trainer: {objective: rl, lr: 1e-4}
stop: {steps: 10}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipes" / "quick.yaml"
    path.parent.mkdir()
    path.write_text(MINIMAL)
    return path


def child(recipe: Path, text: str, extends: str = "quick.yaml") -> Path:
    path = recipe.parent / "child.yaml"
    path.write_text(f"extends: {extends}\n{text}")
    return path


def test_dump_resolves_to_the_same_configuration(recipe: Path, tmp_path: Path) -> None:
    config = resolve(recipe, parse_command_line(["extra.word=1e-4", "extra.text='1e-4'", "extra.yes='true'"]))
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(config))
    again = resolve(copy)
    assert again == config
    assert digest(again) == digest(config)
    assert again.extra == {"word": 1e-4, "text": "1e-4", "yes": "true"}


def test_digest_differs_with_any_value(recipe: Path) -> None:
    base, other = resolve(recipe), resolve(recipe, parse_command_line(["run.seed=1"]))
    assert len(digest(base)) == 32
    assert digest(base) == digest(resolve(recipe))
    assert digest(base) != digest(other)


def test_paths_start_from_the_file_that_names_them(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = recipe.parent.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = resolve(recipe, parse_command_line(["model.path=other", "engines.policy.python=~/bin/python"]))
    assert config.reward.hook == f"{recipe.parent}/score.py:score"
    assert config.source.hook == "calculator:source"
    assert config.model.path == elsewhere / "other"
    assert config.run.folder == elsewhere / "runs" / "quick"
    assert config.engines["policy"].python == Path.home() / "bin/python"


def test_a_layer_merges_mappings_and_replaces_the_rest(recipe: Path) -> None:
    path = child(recipe, "trainer: {betas: [0.5, 0.6], megatron: {num-layers: 2}}\nengines: {judge: {count: 2}}\n")
    config = resolve(path)
    assert config.trainer.lr == 1e-4
    assert config.trainer.betas == (0.5, 0.6)
    assert config.trainer.megatron == {"num_layers": 2}
    assert sorted(config.engines) == ["judge", "policy"]
    assert config.origins.where(("trainer", "betas")).endswith("child.yaml:2: trainer.betas")
    assert config.origins.where(("trainer", "lr")).endswith("quick.yaml:8: trainer.lr")
    assert config.origins.where(("trainer", "tp")) == "trainer.tp (default)"


def test_later_parents_lie_over_earlier_ones(recipe: Path) -> None:
    (recipe.parent / "sub").mkdir()
    (recipe.parent / "sub" / "big.yaml").write_text("trainer: {lr: 3e-4}\nmodel: {path: ./large}\n")
    config = resolve(child(recipe, "", extends="[quick.yaml, sub/big.yaml]"))
    assert config.trainer.lr == 3e-4
    assert config.model.path == recipe.parent / "sub" / "large"


def test_naming_one_alternative_sets_aside_the_lower_layers_choice(recipe: Path) -> None:
    hub = "{id: org/tiny, revision: v1}"
    config = resolve(child(recipe, f"model: {{hub: {hub}}}\nsource: {{data: '*.jsonl'}}\n"))
    assert config.model.path is None
    assert config.source.hook is None
    assert config.source.data == (recipe.parent / "*.jsonl",)
    with pytest.raises(ConfigError, match="found `path` and `hub`; expected exactly one of"):
        resolve(child(recipe, f"model: {{path: a, hub: {hub}}}\n"))


def test_another_hook_sets_aside_the_arguments_of_the_one_below(recipe: Path) -> None:
    path = child(recipe, "reward: {args: {scale: 2}}\n")
    assert resolve(path).reward.args == {"scale": 2}
    assert resolve(path, parse_command_line(["reward.args.bias=1"])).reward.args == {"scale": 2, "bias": 1}
    assert resolve(path, parse_command_line(["reward.hook=other:score"])).reward.args == {}


def test_a_cycle_of_extends_is_refused_with_its_chain(recipe: Path) -> None:
    path = child(recipe, "", extends="back.yaml")
    (recipe.parent / "back.yaml").write_text("extends: child.yaml\n")
    with pytest.raises(ConfigError, match=r"child\.yaml -> .*back\.yaml -> .*child\.yaml"):
        resolve(path)


def test_extends_must_name_files(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"child\.yaml:1: extends: found .* expected a file name"):
        resolve(child(recipe, "", extends="{a: 1}"))
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: found no readable file"):
        resolve(child(recipe, "", extends="nowhere.yaml"))


def test_null_removes_an_engine_argument_and_a_section(recipe: Path) -> None:
    path = child(recipe, "engines: {policy: {sglang: {mem_fraction_static: null, mem-fraction-static: null}}}\n")
    with pytest.raises(ConfigError, match="spelled twice"):
        resolve(path)
    path = child(recipe, "engines: {policy: {sglang: {mem-fraction-static: null}}}\nevaluation: null\n")
    assert resolve(path).engines["policy"].sglang == {}


def test_a_configuration_is_frozen(recipe: Path) -> None:
    config = resolve(recipe)
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.lr = 1.0  # type: ignore[misc]


def test_typed_extra_reads_user_keys_with_the_hooks_schema(recipe: Path) -> None:
    class Judge(BaseModel):
        model_config = {"extra": "forbid"}
        retries: int = 3
        prompt: str = "?"

    path = child(recipe, "extra:\n  judge:\n    retries: 5\n  bad:\n    retrys: 5\n    prompt: [1]\n")
    config = resolve(path)
    assert typed_extra(config, Judge, "judge") == Judge(retries=5)
    assert typed_extra(config, Judge, "absent") == Judge()
    with pytest.raises(ConfigError) as caught:
        typed_extra(config, Judge, "bad")
    assert len(caught.value.problems) == 2
    assert "child.yaml:6: extra.bad.retrys: found unknown key `retrys`" in str(caught.value)
    assert "did you mean `extra.bad.retries`" in str(caught.value)
    assert "child.yaml:7: extra.bad.prompt: found [1] (list); expected text" in str(caught.value)


def test_an_override_lies_over_the_files(recipe: Path) -> None:
    config = resolve(recipe, [Override(("trainer", "lr"), 0.5), Override(("engines", "*", "sglang", "page-size"), 16)])
    assert config.trainer.lr == 0.5
    assert config.engines["policy"].sglang == {"mem-fraction-static": 0.3, "page-size": 16}
    assert config.origins.where(("trainer", "lr")) == "command line: trainer.lr"
