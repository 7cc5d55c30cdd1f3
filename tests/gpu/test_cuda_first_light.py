"""The same code on CUDA: Megatron world, SGLang engine, and a whole run, sharing one card. Skips plainly elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calculator's model in a shape that CUDA attention kernels take (head_dim 64, two KV heads)."""
    from physarum.agents.calculator.model import build

    folder = tmp_path_factory.mktemp("model")
    build(folder, seed=0, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=256)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_on_cuda_is_the_loss_of_transformers(model: Path, dtype: str) -> None:
    script = f"""
import json, numpy as np, torch
from pathlib import Path
from physarum.actors.trainer.world import World
from physarum.actors.trainer.world_config import WorldConfig
from physarum.actors.trainer.batch import TrainSequence
rng = np.random.default_rng(0)
ids = [rng.integers(20, 120, size=int(n)).astype(np.int32) for n in rng.integers(12, 60, size=32)]
sequences = [TrainSequence(i, 4, np.ones(len(i) - 4, bool), np.full(len(i) - 4, np.nan, np.float32), 0.0, n)
             for n, i in enumerate(ids)]
world = World.start(WorldConfig(hf_folder={str(model)!r}, objective="sft", lr=1e-4, dtype={dtype!r}))
mine = world.logprobs(sequences)
from transformers import AutoModelForCausalLM
hf = AutoModelForCausalLM.from_pretrained({str(model)!r}, dtype=torch.{dtype}).cuda()
worst = 0.0
with torch.no_grad():
    for one, sequence in zip(mine, sequences):
        tokens = torch.tensor(sequence.token_ids[None].astype(np.int64)).cuda()
        logits = hf(tokens).logits[0, :-1].float()
        expected = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[3:, 0].cpu().numpy()
        worst = max(worst, float(np.abs(one - expected).max()))
losses = [world.step(sequences).loss for _ in range(5)]
exported = dict(world.export())
world.close()
print(json.dumps({{"worst": worst, "losses": losses, "tensors": len(exported)}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=280, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["worst"] < (1e-3 if dtype == "float32" else 0.15), found
    assert np.all(np.diff(found["losses"]) < 0), found
    assert found["tensors"] > 10


def _engine_path() -> list[str]:
    """Where SGLang lies beside this interpreter's own packages, the engine must be told (it never inherits ours)."""
    path = os.environ.get("PYTHONPATH", "")
    return [f"engines.policy.env.PYTHONPATH={path}"] if path else []


@pytest.mark.timeout(580)
def test_a_whole_run_on_one_card(tmp_path: Path) -> None:
    """Engine and trainer share the card; the run is the quick start with a model of a GPU's shape, and it learns."""
    done = subprocess.run(
        [
            sys.executable, "-m", "physarum.actors.actorctl", "up", str(ROOT / "configs" / "h200_calculator.yaml"),
            f"run.root={tmp_path}", *_engine_path(),
        ],
        capture_output=True, text=True, cwd=ROOT, timeout=560, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    summary = json.loads((tmp_path / "h200-calculator" / "summary.json").read_text())
    assert summary["account"]["imbalance"] == 0
    assert summary["reward_end"] > summary["reward_start"]
