"""What is done with a mirror: copy a checkpoint there, let old ones go, compare, bring one back. Blocking.

Invariant: after any write, and after none, a checkpoint is there whole or does not count; on disk likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from physarum.actors.mirror.errors import MirrorUnfitError
from physarum.actors.mirror.records import Named
from physarum.actors.mirror.store import BLOCK_BYTES, Moved, Store
from physarum.actors.trainer.digests import DIGESTS, digest_of, read_digests


def copy(store: Store, folder: Path, checkpoint: Named, moved: Moved) -> int:
    """Sends what is not there; returns the bytes sent, 0 when it was whole. Raises MirrorUnfitError where `folder` differs."""
    if store.listing(checkpoint) is not None:
        return 0
    listing = (folder / DIGESTS).read_bytes()
    files = read_digests(listing)
    if digest_of(files) != checkpoint.digest:
        raise MirrorUnfitError(
            f"{folder} has digest {digest_of(files)}, the ledger says {checkpoint.digest}: it was altered"
        )
    sent = 0
    for file, expected in files.items():
        found = _digest(_blocks(folder / file), moved)
        if found != expected:
            raise MirrorUnfitError(f"checkpoint file {folder / file} has digest {found}, expected {expected}")
        sent += store.write(checkpoint, folder / file, moved)
    store.conclude(checkpoint, listing)
    return sent + len(listing)


def retain(store: Store, candidates: Sequence[Named], known: Sequence[Named], keep: int, moved: Moved) -> list[str]:
    """Removes of `known` all but the newest `keep` of `candidates` (oldest first) that are whole there; returns their keys.

    What nobody knows belongs to another run of this name, or to a later trainer.
    """
    there = store.keys()
    kept: list[str] = []
    for one in reversed(candidates):
        if len(kept) < keep and one.key in there and store.listing(one) is not None:
            kept.append(one.key)
    gone = [one for one in known if one.key in there and one.key not in kept]
    for one in gone:
        store.remove(one)
        moved()
    return [one.key for one in gone]


def fault(store: Store, checkpoint: Named, moved: Moved) -> str:
    """What is missing or altered of it there, by reading every byte; "" for nothing."""
    listing = store.listing(checkpoint)
    if listing is None:
        return f"{store.name(checkpoint)} is not there, or not whole"
    for file, expected in read_digests(listing).items():
        try:
            found = _digest(store.read(checkpoint, file), moved)
        except FileNotFoundError:
            return f"{store.name(checkpoint)}/{file} is missing"
        if found != expected:
            return f"{store.name(checkpoint)}/{file} has digest {found}, expected {expected}: it was altered"
    return ""


def fetch(store: Store, checkpoint: Named, folder: Path, moved: Moved) -> int:
    """Brings it into `folder`, the digests last; returns its bytes. Raises MirrorUnfitError when it differs or is not there."""
    listing = store.listing(checkpoint)
    if listing is None:
        raise MirrorUnfitError(
            f"{store.name(checkpoint)} is not there, or not whole: it was let go (checkpoint.mirror_keep), or was never copied"
        )
    size = len(listing)
    for file, expected in read_digests(listing).items():
        if Path(file).name != file:
            raise MirrorUnfitError(
                f"{store.name(checkpoint)} names a file {file!r}; expected a plain name: it was altered"
            )
        size += _bring(store, checkpoint, file, expected, folder, moved)
    (folder / DIGESTS).write_bytes(listing)
    return size


def _bring(store: Store, checkpoint: Named, file: str, expected: str, folder: Path, moved: Moved) -> int:
    state = xxhash.xxh3_128()
    try:
        with (folder / file).open("wb") as out:
            for block in store.read(checkpoint, file):
                out.write(block)
                state.update(block)
                moved()
            size = out.tell()
    except FileNotFoundError as error:
        raise MirrorUnfitError(f"{store.name(checkpoint)}/{file} is missing ({error})") from error
    if state.hexdigest() != expected:
        raise MirrorUnfitError(
            f"{store.name(checkpoint)}/{file} has digest {state.hexdigest()}, expected {expected}: it was altered"
        )
    return size


def _digest(blocks: Iterable[bytes], moved: Moved) -> str:
    state = xxhash.xxh3_128()
    for block in blocks:
        state.update(block)
        moved()
    return state.hexdigest()


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb", buffering=0) as opened:
        while block := opened.read(BLOCK_BYTES):
            yield block
