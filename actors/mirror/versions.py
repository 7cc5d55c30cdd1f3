"""A version's bytes on this host, on their way to an object store. Blocking; in the mirror's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from physarum.actors.mirror.records import CopyVersion, VersionCopied
from physarum.configs.secrets import read_secret
from physarum.weightsync.area import SharedArea
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.errors import BucketError, BucketUnfitError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.layout import WEIGHT_SUFFIXES
from physarum.weightsync.manifest import Manifest, decode_manifest
from physarum.weightsync.mirror.bucket import Bucket
from physarum.weightsync.mirror.copying import Copying, Read

_LARGEST_FILE: Final = 64 << 20


def copy(request: CopyVersion, moved: Callable[[], None]) -> VersionCopied:
    """Carries it out. Raises WeightSyncError; where only old versions could not go, the answer says why."""
    manifest = decode_manifest(request.manifest)
    copying = Copying(Bucket(request.url), moved, read_secret(request.key_env))
    with _chunks(Path(request.area), Path(request.chunks), manifest) as read:
        copied = copying.copy(manifest, read, model_files(Path(request.model)), request.withdrawn)
    try:
        return VersionCopied(copied.objects, copied.size_bytes, copying.retain(request.keep))
    except (BucketError, BucketUnfitError) as error:
        return VersionCopied(copied.objects, copied.size_bytes, [], kept=str(error))


def model_files(folder: Path) -> dict[str, Path]:
    """What stands in a model's folder beside its weights: the configuration, the tokenizer's files; by name."""
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(WEIGHT_SUFFIXES)
        and path.stat().st_size <= _LARGEST_FILE
    }


@contextmanager
def _chunks(area: Path, chunks: Path, manifest: Manifest) -> Iterator[Read]:
    """What reads a chunk of the version. A file of the area is not overwritten until the end, whoever gives it up meanwhile."""
    file = HeldFile.open(SharedArea(area, only_look=True), manifest.label)
    if file is None:
        yield ChunkStore(chunks, only_look=True).read
        return
    with file:
        places = file.places(manifest)

        def read(digest: str) -> memoryview:
            return file.slice(*places[digest])

        yield read
