"""Folders in Megatron's torch_dist format, written and read.

Invariant: what is read may come from anywhere: tensors are unpickled as weights only, and the folder's `.metadata` by an
unpickler that knows the records of torch.distributed.checkpoint and nothing else. The format is Megatron-core's own
(megatron.core.dist_checkpointing, torch's DCP inside); only its `save` and `load` are not called: the one starts a helper
process in every rank, the other trusts pickles.
"""

import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from physarum.actors.trainer.errors import StateMismatch, StateNotWritten
from physarum.actors.trainer.megatron.record_pickle import read_record

Sharded: TypeAlias = Any
"""Nested dicts and lists whose leaves are Megatron's ShardedTensors and ShardedTensorFactories."""
Taken: TypeAlias = dict[str, Any]
"""torch's own form of what one rank writes, by the names in the file."""


def is_torch_dist(folder: Path) -> bool:
    """Whether the folder says so of itself."""
    try:
        config = maybe_load_config(str(folder))
    except (OSError, json.JSONDecodeError, TypeError):
        return False
    return config is not None and config.sharded_backend == "torch_dist"


def taken(tree: Sharded, common: Mapping[str, Any]) -> Taken:
    """What this rank is to write of `tree` (which is used up), as it is now, on the host.

    `common` is what Megatron-core's own `load` returns beside the tensors.
    """
    tensors, _ = save_preprocess(tree)
    rank = torch.distributed.get_rank()
    tensors["common_state"] = ShardedObject("common_state", dict(common), (1,), (0,), replica_id=rank)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, keep_only_main_replica=True)
    for shards in by_key.values():
        for shard in shards:
            if isinstance(shard, ShardedTensor):
                shard.data = shard.data.detach().to("cpu", copy=True)
    state: Taken = mcore_to_pyt_state_dict(by_key)
    return state


def write(folder: Path, state: Taken, group: torch.distributed.ProcessGroup | None = None) -> None:
    """Writes what each rank has taken into `folder`, one file a rank, flushed; collective over `group` (None: the world).

    Raises StateNotWritten on all ranks.
    """
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        checkpoint.save(state, storage_writer=Writer(folder), planner=planner, process_group=group)
        if torch.distributed.get_rank() == 0:
            save_config(CheckpointingConfig("torch_dist"), str(folder))
    except (CheckpointException, OSError) as error:
        raise StateNotWritten(
            f"torch_dist state could not be written to {folder} ({_reason(error)}); "
            "expected a writable folder with room: free some and save again into a new folder"
        ) from error
    except RuntimeError as error:  # what a rank could not write is a CheckpointException: they do not hear each other
        raise StateNotWritten(
            f"torch_dist state could not be written to {folder}: the ranks lost each other ({error}); expected all to take "
            "part: the log of the rank that ended or is silent says why"
        ) from error


def read(folder: Path, tree: Sharded) -> Any:
    """Fills the tensors of `tree` in place and returns it with them in the place of its leaves.

    Raises StateMismatch before anything is changed where a tensor is missing or of another shape.
    """
    reader = Reader(folder)
    tensors, _, factories = load_preprocess(tree)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors)
    _check(folder, reader.shapes(), by_key)
    flexible = {key: shards[0] for key, shards in by_key.items() if shards[0].allow_shape_mismatch}
    planner = MCoreLoadPlanner(
        allow_shape_mismatch_sharded_tensors=flexible, flatten_state_dict=False, flatten_sharded_tensors=False
    )
    try:
        with warnings.catch_warnings():  # each rank reads what it needs; that nobody talks is no mistake
            warnings.simplefilter("ignore")
            checkpoint.load(mcore_to_pyt_state_dict(by_key, True), storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:  # not a TrainerError: what was filled already stays so
        raise RuntimeError(f"torch_dist state in {folder} is damaged ({_reason(error)})") from error
    return apply_factory_merges(dict_list_map_outplace(_tensor, tensors), factories)


def names(tree: Sharded) -> set[str]:
    """Of the whole tensors of which `tree` has parts, as the file has them."""
    return set(_replace_state_dict_keys_with_sharded_keys(load_preprocess(tree)[0])[0])


class Writer(FileSystemWriter):
    """torch's writer, whose errors say why: its zip files turn a full disk into a RuntimeError about positions."""

    def __init__(self, folder: Path) -> None:
        # What is written is on the host. To copy ahead torch would take a stream of the writing thread's device: the first one.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = _Files()


class _File(io.BufferedWriter):
    """Remembers why a write failed."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


class _Files(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as other:
                yield other
            return
        with _File(io.FileIO(path, "wb")) as file:
            try:
                yield file
            except RuntimeError as error:
                if file.failure is None:
                    raise
                raise OSError(file.failure.errno, file.failure.strerror, str(path)) from error


class Reader(FileSystemReader):
    """torch's reader with an unpickler that refuses everything but the records of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Raises StateMismatch where it is missing or no such record."""
        try:
            with (self._folder / ".metadata").open("rb") as file:
                found = read_record(file)
        except (OSError, EOFError, ValueError, AttributeError, TypeError, IndexError, KeyError) as error:
            raise StateMismatch(
                f"{self._folder} is no readable torch_dist folder ({type(error).__name__}: {error}); "
                "expected .metadata as torch.distributed.checkpoint writes it: choose another folder"
            ) from error
        if not isinstance(found, Metadata):
            raise StateMismatch(f"{self._folder}/.metadata holds a {type(found).__name__}; expected a checkpoint's")
        found.storage_meta = found.storage_meta or StorageMeta()
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor by its key."""
        stored = self.read_metadata().state_dict_metadata
        return {key: tuple(one.size) for key, one in stored.items() if isinstance(one, TensorStorageMetadata)}


def _check(folder: Path, stored: Mapping[str, tuple[int, ...]], own: Mapping[str, list[ShardedTensor]]) -> None:
    wrong = [
        (key, stored.get(key), tuple(shards[0].global_shape))
        for key, shards in own.items()
        if key not in stored or (not shards[0].allow_shape_mismatch and stored[key] != tuple(shards[0].global_shape))
    ]
    if wrong:
        key, found, expected = min(wrong)
        raise StateMismatch(
            f"training state in {folder}: {len(wrong)} tensors differ, first {key}: found {found}, expected {expected}; "
            "it belongs to another model or another kind of optimizer"
        )


def _tensor(leaf: ShardedTensor) -> Tensor:
    """Without the axes that stand for the layer or the expert."""
    data = leaf.data
    return data.view(data.shape[data.dim() - len(leaf.local_shape) :])


def _reason(error: BaseException) -> str:
    """The first rank's own words instead of all ranks' tracebacks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return str(error)
