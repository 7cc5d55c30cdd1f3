"""Write a Hugging Face folder that transformers and engines load, from a stream of tensors.

Invariant: at most `SHARD_BYTES` of tensors are held; everything but the weights is the start model's, except that
config.json names the type of the weights written (of most of their bytes), and how they were quantised.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from physarum.actors.trainer.errors import StateNotWritten
from physarum.weightsync.layout import WEIGHT_SUFFIXES
from physarum.weightsync.quantisation.plan import Quantisation

SHARD_BYTES = 2 << 30
"""Size of one safetensors file."""

_PLAIN = ("float64", "float32", "bfloat16", "float16")
_QUANTISED = ("quantization_config", "compression_config")


def write_hf_folder(
    start: Path, target: Path, tensors: Iterable[tuple[str, Tensor]], quantisation: Quantisation | None = None
) -> None:
    """Fill `target` (created if missing) with `tensors` and the other files of `start`; all is flushed to disk.

    `tensors` are unquantised, and become what `quantisation` makes of them, whatever `start` is.

    No two tensors may share storage. Raises OSError when it cannot be written, QuantisationError; the folder is then not whole.
    """
    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    shards: list[Path] = []
    sizes: Counter[str] = Counter()
    for shard in _shards(tensors if quantisation is None else quantisation.tensors(tensors)):
        path = target / f"part-{len(shards) + 1:05d}.safetensors"
        _save(shard, path)
        weight_map |= dict.fromkeys(shard, path.name)
        for tensor in shard.values():
            sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
        shards.append(path)
    _name_shards(target, shards, weight_map, sizes.total())
    for path in sorted(start.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name != "config.json":
            shutil.copyfile(path, target / path.name)
    config = json.loads((start / "config.json").read_text())
    for name in ("torch_dtype", *_QUANTISED):
        config.pop(name, None)
    # Of what is not quantised: embeddings and norms never are.
    config["dtype"] = max(_PLAIN, key=lambda name: sizes[name])
    if quantisation is not None:
        config["quantization_config"] = quantisation.options
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in target.iterdir():
        if path.is_file():
            _flush(path)


def _save(shard: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its words for a full disk
        raise StateNotWritten(f"{path} cannot be written ({error}); expected room and a writable folder") from error


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def _name_shards(target: Path, shards: list[Path], weight_map: dict[str, str], total: int) -> None:
    """Final names as transformers has them: one file, or numbered files with an index."""
    if len(shards) == 1:
        shards[0].rename(target / "model.safetensors")
        return
    names = {path.name: f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i, path in enumerate(shards)}
    for path in shards:
        path.rename(target / names[path.name])
    index = {"metadata": {"total_size": total}, "weight_map": {key: names[part] for key, part in weight_map.items()}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
