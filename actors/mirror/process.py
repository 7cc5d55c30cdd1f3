"""The process that speaks to an object store: one request on standard input, answers on standard output.

A process, so that the store's client takes nothing of the trainer's interpreter, and ends when it is told to whatever the
client is at. It dies with whoever asked.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from physarum.actors.mirror import copying
from physarum.actors.mirror import versions as of_versions
from physarum.actors.mirror.errors import MirrorUnfitError
from physarum.actors.mirror.records import (
    Answer,
    Asked,
    Copied,
    Copy,
    CopyVersion,
    Failed,
    Fetch,
    Fetched,
    Moved,
    Request,
    Retain,
    Retained,
    Survey,
    Surveyed,
    Verified,
    Verify,
)
from physarum.actors.mirror.store import Moved as Told
from physarum.actors.mirror.store import Store
from physarum.actors.parent import die_with_parent
from physarum.weightsync.errors import BucketUnfitError, WeightSyncError

_STDOUT: Final = 1
_STDERR: Final = 2


def main() -> None:
    """Entry point of `python -m physarum.actors.mirror.process`."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    answers = _take_output()
    asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=Asked)
    die_with_parent(asked.parent, sys.stdin.buffer)

    def tell(answer: Answer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    tell(answered(asked.request, lambda: tell(Moved())))


def answered(request: Request, moved: Told) -> Answer:
    """Carries it out; whatever is raised becomes Failed."""
    try:
        if isinstance(request, CopyVersion):
            return of_versions.copy(request, moved)
        return _carried_out(request, Store(request.url), moved)
    except (MirrorUnfitError, BucketUnfitError) as error:
        return Failed(str(error), unfit=True)
    except WeightSyncError as error:
        return Failed(str(error), unfit=False)
    except Exception as error:  # noqa: BLE001 - every client raises errors of its own; it is raised again where it is asked
        return Failed(f"{request.url}: {type(error).__name__}: {error}", unfit=False)


def _carried_out(request: Copy | Retain | Survey | Verify | Fetch, store: Store, moved: Told) -> Answer:
    match request:
        case Copy():
            return Copied(copying.copy(store, Path(request.folder), request.checkpoint, moved))
        case Retain():
            return Retained(copying.retain(store, request.candidates, request.known, request.keep, moved))
        case Survey():
            there = store.keys()
            return Surveyed([one for one in request.checkpoints if one.key in there and store.listing(one) is not None])
        case Verify():
            return Verified([copying.fault(store, one, moved) for one in request.checkpoints])
        case Fetch():
            return Fetched(copying.fetch(store, request.checkpoint, Path(request.folder), moved))


def _take_output() -> BinaryIO:
    """Standard output for answers alone: what a client prints goes to standard error."""
    answers = os.fdopen(os.dup(_STDOUT), "wb")
    os.dup2(_STDERR, _STDOUT)
    return answers


if __name__ == "__main__":
    main()
