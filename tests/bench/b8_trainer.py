"""B8: an optimizer step of the trainer against a bare loop over the same Megatron modules, on the same tokens.

    physarum   World.step: packing, objective with entropy and metrics, chunked log-probabilities, optimizer
    bare       forward, float32 logits of all tokens at once, cross-entropy, backward, Megatron's optimizer; nothing else

In turn A B B A. On CUDA a model of Qwen3-0.6B's shape in bfloat16 and 16,384 packed tokens; peak memory is of either side
alone, and `profile` lists what the device's time of one step goes to. Random weights; AdamW, distributed optimizer.
`new lengths` has others in every step, as answers do: kernels that are compiled or tuned per shape pay for that.

    python -m tests.bench.b8_trainer --pairs 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.megatron.forward import call_model
from physarum.actors.trainer.megatron.microbatch import microbatch_tensors
from physarum.actors.trainer.world import World
from physarum.actors.trainer.world_config import WorldConfig
from tests.bench.models import save_qwen3

_log = logging.getLogger(__name__)


PROMPT: Final = 8


def lognormal(tokens: int, seed: int) -> list[int]:
    """Lengths of median 300 and sigma 1, from 32 to 6144, that fill a pack exactly: none like another, as answers are."""
    random = np.random.default_rng(seed)
    found: list[int] = []
    while sum(found) < tokens:
        found.append(int(np.clip(300 * np.exp(random.standard_normal()), 32, 6144)))
    found[-1] -= sum(found) - tokens
    return found if found[-1] > PROMPT else lognormal(tokens, seed + 1_000_003)


Lengths = Callable[[int], list[int]]
"""Of the sequences of step n."""
LAYOUTS: Final[dict[str, dict[str, Lengths]]] = {
    "cuda": {
        "8 x 2048": lambda _: [2048] * 8,
        "8192 to 128": lambda _: [8192, 4096, 2048, 1024, 512, 256, 128, 128],
        "lognormal": lambda _: lognormal(16384, 0),
        "lognormal, new lengths": lambda step: lognormal(16384, step),
    },
    "cpu": {"4 x 256": lambda _: [256] * 4, "512 to 32": lambda _: [512, 256, 128, 64, 32, 32]},
}
WARM: Final = 2
_TOP: Final = 14


async def measure(size: str) -> dict[str, Any]:
    """The fields of B8 on this host's device."""
    return await asyncio.to_thread(rows, 1 if size == "smoke" else 5)


def rows(pairs: int) -> dict[str, Any]:
    """One row a layout; both sides have a world of their own, so neither pays for the other's memory."""
    cuda = torch.cuda.is_available()
    shape = "0.6B" if cuda else "small"
    found = []
    with tempfile.TemporaryDirectory(prefix="b8-") as name:
        vocabulary = save_qwen3(Path(name), shape)
        for layout, lengths in LAYOUTS["cuda" if cuda else "cpu"].items():
            found.append({"shape": f"{shape}, {layout}"} | _row(Path(name), lengths, vocabulary, pairs))
            _log.info("%s", {key: value for key, value in found[-1].items() if key != "profile"})
    device = torch.cuda.get_device_name(0) if cuda else "cpu"
    return {"device": device, "pairs": pairs, "rows": found}


def _row(folder: Path, lengths: Lengths, vocabulary: int, pairs: int) -> dict[str, Any]:
    tokens = sum(lengths(0))
    config = WorldConfig(
        hf_folder=str(folder),
        lr=1e-6,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        tokens_per_microbatch=tokens,
        megatron={"use_distributed_optimizer": True},
    )
    batches = (_sequences(lengths(step), vocabulary) for step in count())
    world = World.start(config)
    try:
        sides: dict[str, Callable[[], object]] = {
            "physarum": lambda: world.step(next(batches)),
            "bare": lambda: _bare_step(world, next(batches)),
        }
        peaks = {name: _peak_gib(step) for name, step in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for pair in range(pairs):
            for name in ("physarum", "bare") if pair % 2 == 0 else ("bare", "physarum"):
                times[name].append(_timed(sides[name]))
        profile = _profile(sides["physarum"]) if torch.cuda.is_available() else None
    finally:
        world.close()
    ratios = [bare / ours for ours, bare in zip(times["physarum"], times["bare"], strict=True)]
    low, _, high = quantiles(ratios, n=4) if pairs > 1 else (ratios[0],) * 3
    ours_s = median(times["physarum"])
    return {
        "physarum_step_s": round(ours_s, 4),
        "bare_step_s": round(median(times["bare"]), 4),
        "ratio": round(median(ratios), 4),
        "iqr": [round(low, 4), round(high, 4)],
        "tokens_per_s": round(tokens / ours_s),
        "physarum_peak_gib": peaks["physarum"],
        "bare_peak_gib": peaks["bare"],
        "profile": profile,
    }


def _sequences(lengths: list[int], vocabulary: int) -> list[TrainSequence]:
    random = np.random.default_rng(0)
    found = []
    for index, length in enumerate(lengths):
        ids = random.integers(8, vocabulary, length).astype(np.int32)
        response = length - PROMPT
        engine = np.full(response, -np.log(vocabulary), np.float32)
        advantage = float(random.normal())
        found.append(TrainSequence(ids, PROMPT, np.ones(response, np.bool_), engine, advantage, index, index // 8))
    return found


def _bare_step(world: World, sequences: list[TrainSequence]) -> None:
    """What a short script over Megatron does; the modules are those of `world`."""
    worker = world._worker
    model = worker.model
    model.ddp.train()
    model.ddp.zero_grad_buffer()  # type: ignore[union-attr]  # a trained model is wrapped
    worker.optimizer.megatron.zero_grad()
    microbatch = microbatch_tensors(sequences, [1.0] * len(sequences), (), 1, world.device)

    def loss_of(hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_unused: Any) -> Tensor:
        weight = output_layer.weight if output_weight is None else output_weight
        logits = (hidden_states.squeeze(1).index_select(0, microbatch.rows) @ weight.T).float()
        return F.cross_entropy(logits[:, : model.vocab_size], microbatch.targets)

    call_model(model.ddp, model, microbatch, loss_of).backward()
    model.ddp.finish_grad_sync()  # type: ignore[union-attr]
    worker.optimizer.megatron.step()


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _timed(step: Callable[[], object]) -> float:
    _synchronise()
    began = time.perf_counter()
    step()
    _synchronise()
    return time.perf_counter() - began


def _peak_gib(step: Callable[[], object]) -> float | None:
    """After warming up; null without a device."""
    for _ in range(WARM):
        step()
    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    return round(torch.cuda.max_memory_allocated() / (1 << 30), 1)


def _profile(step: Callable[[], object]) -> list[dict[str, Any]]:
    """The operators with most device time of their own in one step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        _synchronise()
    events = sorted(profiler.key_averages(), key=lambda one: one.self_device_time_total, reverse=True)
    total = sum(one.self_device_time_total for one in events)
    return [
        {"name": one.key[:80], "ms": round(one.self_device_time_total / 1000, 2), "calls": one.count,
         "share": round(one.self_device_time_total / total, 3)}
        for one in events[:_TOP]
    ]  # fmt: skip


def main() -> None:
    """`make bench B=B8` is the fixed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    logging.basicConfig(level=logging.INFO)
    print(json.dumps(rows(parser.parse_args().pairs)))


if __name__ == "__main__":
    main()
