"""The process that reads from an object store for another one: `python -m physarum.weightsync.mirror.process URL THREADS`.

A process, so that the store's client takes nothing of an engine's actor, and ends when it is told to, whatever it is at. It
ends with whoever started it: its standard input does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Final

import msgspec

from physarum.weightsync.errors import BucketError, BucketUnfitError, ObjectAbsentError
from physarum.weightsync.mirror.bucket import Bucket
from physarum.weightsync.mirror.wire import ABSENT, FAILED, OK, UNFIT, Question, send_answer

_STDOUT: Final = 1
_STDERR: Final = 2


def main() -> None:
    """Answers until standard input ends, then ends at once."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    url, threads = sys.argv[1], int(sys.argv[2])
    answers = _take_output()
    guard = threading.Lock()
    bucket: list[Bucket] = []

    def answer(question: Question) -> None:
        kind, data = _answered(url, bucket, question)
        with guard:
            send_answer(answers, question.number, kind, data)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="bucket")
    for line in sys.stdin.buffer:
        pool.submit(answer, msgspec.json.decode(line, type=Question))
    os._exit(0)


def _answered(url: str, bucket: list[Bucket], question: Question) -> tuple[int, bytes]:
    """The kind of the answer, and its bytes. The bucket is opened by the first question."""
    try:
        if not bucket:
            bucket.append(Bucket(url))
        if question.call == "get":
            return OK, bucket[0].get(question.key)
        return OK, msgspec.json.encode(bucket[0].sizes(question.key))
    except ObjectAbsentError as error:
        return ABSENT, str(error).encode()
    except BucketUnfitError as error:
        return UNFIT, str(error).encode()
    except BucketError as error:
        return FAILED, str(error).encode()
    except Exception as error:  # noqa: BLE001 - every client raises errors of its own; it is raised again where it is asked
        return FAILED, f"{url}: {type(error).__name__}: {error}".encode()


def _take_output() -> BinaryIO:
    """Standard output for answers alone: what a client prints goes to standard error."""
    answers = os.fdopen(os.dup(_STDOUT), "wb")
    os.dup2(_STDERR, _STDOUT)
    return answers


if __name__ == "__main__":
    main()
