"""What the installed SGLang does with a draft model when the engine is updated; run in the engine's own Python, prints JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.models.mimo_mtp import MiMoMTP


class Runner:
    """Notes what it is asked to load."""

    def __init__(self, role: str, asked: list[str]) -> None:
        self.weight_updater = SimpleNamespace(
            update_weights_from_disk=lambda *a, **k: (asked.append(role) or True, "")  # type: ignore[func-returns-value]
        )


def manager(asked: list[str]) -> Any:
    made = object.__new__(SchedulerWeightUpdaterManager)
    made.tp_worker = SimpleNamespace(weight_update_runners=lambda: [("target", Runner("target", asked))])
    made.draft_worker = SimpleNamespace(weight_update_runners=lambda: [("draft", Runner("draft", asked))])
    made.metrics_collector = None
    made.flush_cache = lambda **options: True
    made.scheduler = SimpleNamespace(record_weight_version_change=lambda new_version: None)
    return made


def loaded(model: Any, own: list[str], offered: list[str]) -> list[str]:
    """Which of its own parameters a model's loader changes. Only their names matter."""
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in own}
    config = SimpleNamespace(tie_word_embeddings=False)
    fake = SimpleNamespace(named_parameters=parameters.items, config=config)
    fake.map_model_name_to_mtp_param_name = lambda name: MiMoMTP.map_model_name_to_mtp_param_name(fake, name)
    with torch.no_grad():
        model.load_weights(fake, [(name, torch.ones(2)) for name in offered])
    return sorted(name for name, value in parameters.items() if bool(value.any()))


def main() -> None:
    asked: list[str] = []
    updater = manager(asked)
    request = SimpleNamespace(
        model_path="/m", load_format="auto", recapture_cuda_graph=False, weight_version="v", flush_cache=False,
        torch_empty_cache=False,
    )  # fmt: skip
    updater.update_weights_from_disk(request)
    norm = "layers.0.input_layernorm.weight"
    found = {
        "disk": asked,
        "selectors": {one: [role for role, _ in updater._select_runners(one)] for one in ("all", "target")},
        "eagle3": loaded(LlamaForCausalLMEagle3, [f"model.{norm}"], [f"model.{norm}"]),
        "mtp of the target": loaded(MiMoMTP, [f"model.mtp_block.{norm[9:]}"], [f"model.{norm}"]),
        "mtp of its own": loaded(MiMoMTP, [f"model.mtp_block.{norm[9:]}"], [f"model.mtp_layers.0.{norm[9:]}"]),
    }
    sys.stdout.write(json.dumps(found) + "\n")


main()
