"""The one pickle that a torch_dist folder cannot do without: `.metadata`, which torch.distributed.checkpoint writes.

Invariant: nothing that the file says is called or imported but the plain records named below and torch's dtypes; they have
no code of their own to run. torch's own restricted unpickler (weights only) does not know the protocol of these files.
"""

import pickle
from typing import Any, BinaryIO

import torch

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}  # fmt: skip
"""What a `.metadata` may be made of; beside it only torch's dtypes. All are records without code of their own."""


def read_record(file: BinaryIO) -> Any:
    """What the file holds. Raises ValueError for anything else, and what a damaged pickle raises."""
    try:
        return _RecordUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from error


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
