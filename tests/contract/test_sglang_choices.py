"""The real SGLang: its sampling parameters are ours, and its choices are those that transformers' own pass makes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from engine_fixture import START_TIMEOUT_S, VOCABULARY, engine_python

from physarum.actors.engine.environment import engine_environment
from physarum.actors.engine.errors import EngineArgumentError
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.actors.engine.schema import inspect_server
from physarum.actors.rollout.choices import routed
from physarum.agents.client import EngineClient
from physarum.agents.fleet.choice import Wanted
from physarum.agents.routing import EngineRef
from physarum.agents.session import EngineChoices
from physarum.agents.tokenizer import FolderTokenizer
from physarum.agents.trajectory import Trajectory
from physarum.configs.sampling import NAMES, REFUSED

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

INTERNAL = {
    "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant",
}  # fmt: skip
"""Fields that SGLang's own record has for itself (0.5.23)."""
TOP_K = 4


def moe_model() -> Any:
    """Two layers with experts: SGLang 0.5.23 serves every layer of a Qwen3 MoE as one, whatever `mlp_only_layers` says."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(torch.float32).eval()


class One:
    """A router that knows one engine."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
        return EngineRef(self.url, "e0", "policy@1.0")

    def release(self, ref: EngineRef) -> None: ...

    def served(self, ref: EngineRef, made: int) -> None: ...

    def failed(self, ref: EngineRef, error: Exception) -> None: ...


@dataclasses.dataclass
class Moe:
    url: str
    reference: Any

    def passed(self, ids: np.ndarray[Any, Any]) -> tuple[list[Any], Any]:
        """Experts of every token by layer with experts, as sorted pairs [T, 2], and logits [T, vocabulary]."""
        import torch

        with torch.no_grad():
            out = self.reference(torch.tensor(ids, dtype=torch.long)[None], output_router_logits=True)
        return [logits.topk(2).indices.sort().values.numpy() for logits in out.router_logits], out.logits[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def moe(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Moe]:
    folder = tmp_path_factory.mktemp("moe")
    reference = moe_model()
    reference.save_pretrained(folder / "model")
    sglang = {"skip-tokenizer-init": True, "max-total-tokens": 8192, "enable-return-routed-experts": True}
    spec = EngineSpec(
        python=engine_python(), model=folder / "model", label="policy@1.0", log_file=folder / "log", sglang=sglang
    )
    process = await EngineProcess.start(spec)
    try:
        async with aiohttp.ClientSession() as session:
            await process.wait_healthy(session, START_TIMEOUT_S)
        yield Moe(process.url, reference)
    finally:
        await process.stop()


async def test_experts_and_kept_tokens_of_two_turns_are_those_of_transformers(moe: Moe) -> None:
    config = json.loads(moe.reference.config.to_json_string(use_diff=False))
    capture = routed(config, nucleus=True)
    assert capture.layers == (0, 1)
    async with aiohttp.ClientSession() as session:
        client = EngineClient(
            session, One(moe.url), FolderTokenizer(Path("unused")), choices=EngineChoices(capture=capture)
        )
        trajectory = Trajectory(list(range(10, 40)))
        sampling = {"top_k": TOP_K, "max_new_tokens": 12, "ignore_eos": True}
        trajectory.append_generated(await client.generate(trajectory.token_ids, sampling))
        trajectory.append_environment([100, 101, 102])
        second = await client.generate(trajectory.token_ids, sampling)
        assert second.routed_from == 41, "only what was not reported before"
        trajectory.append_generated(second)
    sample = trajectory.sample()
    experts, logits = moe.passed(sample.token_ids)
    assert sample.routed_experts is not None and sample.routed_experts.shape == (len(sample.token_ids) - 1, 2, 2)
    for layer, expected in enumerate(experts):
        assert np.array_equal(np.sort(sample.routed_experts[:, layer]), expected[:-1])
    kept = sample.kept_tokens
    assert kept is not None and kept.counts.tolist() == [TOP_K] * 12 + [0] * 3 + [TOP_K] * 12
    for row in np.flatnonzero(kept.counts):
        ids = kept.ids[kept.offsets[row] : kept.offsets[row + 1]]
        likeliest = logits[sample.prompt_len + row - 1].topk(TOP_K).indices.tolist()
        assert sorted(ids.tolist()) == sorted(likeliest)
        assert sample.token_ids[sample.prompt_len + row] in ids


async def test_every_parameter_that_the_engine_takes_is_known_here_and_none_else(tmp_path: Path) -> None:
    schema = await inspect_server(engine_python(), engine_environment("cpu", {}), tmp_path)
    assert set(schema.sampling) - INTERNAL == NAMES | set(REFUSED)


async def test_the_engine_takes_every_parameter_but_the_grammars_that_need_a_backend(moe: Moe) -> None:
    sampling = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "max_new_tokens": 4, "min_new_tokens": 0,
        "frequency_penalty": 0.1, "presence_penalty": -0.1, "repetition_penalty": 1.1, "logit_bias": {"5": -1.0},
        "stop_token_ids": [2, 3], "ignore_eos": True, "no_stop_trim": True, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "sampling_seed": 11, "custom_params": {"budget": 3},
    }  # fmt: skip
    async with aiohttp.ClientSession() as session:
        client = EngineClient(session, One(moe.url), FolderTokenizer(Path("unused")))
        made = await client.generate([10, 11, 12], sampling)
    assert 1 <= len(made.token_ids) <= 4 and np.isfinite(made.logprobs).all()


async def test_a_parameter_that_the_installed_release_lacks_is_refused_before_anything_starts(tmp_path: Path) -> None:
    spec = EngineSpec(
        python=engine_python(), model=tmp_path, label="policy@1.0", log_file=tmp_path / "log", sampling=["top_z"]
    )
    with pytest.raises(EngineArgumentError, match=r"sglang \S+ has no sampling parameter top_z"):
        await EngineProcess.start(spec)
