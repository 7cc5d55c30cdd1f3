"""The command loop of ranks 1 to N - 1.

Invariant: each command is answered by one exchange of outcomes; a refusal (TrainerError) keeps the rank alive, anything
else ends it after it was reported.
"""

import datetime
import logging
from pathlib import Path

import torch.distributed as dist

from physarum.actors.trainer.batch import decode_sequences
from physarum.actors.trainer.commands import (
    Channel,
    Close,
    Command,
    Export,
    Load,
    LoadOptimizer,
    Logprobs,
    Save,
    Snapshot,
    Step,
)
from physarum.actors.trainer.errors import TrainerError, describe
from physarum.actors.trainer.megatron import distributed
from physarum.actors.trainer.worker import Worker
from physarum.actors.trainer.world_config import WorldConfig

logger = logging.getLogger(__name__)


def connect(config: WorldConfig, port: int) -> dist.TCPStore:
    """The rendezvous store that rank 0 holds."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=config.start_timeout_s))


def serve(config: WorldConfig, rank: int, port: int) -> None:
    """Join the world and obey until Close."""
    store = connect(config, port)
    store.set(f"rank/{rank}", "up")
    worker = Worker(config, store, rank)
    channel = Channel(config.timeout_s)
    channel.outcomes("", waits=True)
    logger.info("rank %d of %d is ready", rank, config.ranks)
    while not isinstance(command := channel.receive(), Close):
        failure = ""
        try:
            execute(worker, command)
        except TrainerError as error:
            failure = describe(error)
        except BaseException as error:
            logger.exception("rank %d failed in %s", rank, type(command).__name__)
            channel.outcomes(describe(error))
            raise
        channel.outcomes(failure, waits=True)
    worker.writing.join()
    distributed.destroy()


def execute(worker: Worker, command: Command) -> None:
    """Run one command for its effect; rank 0 runs the same worker methods for their results."""
    match command:
        case Step(sequences, lr, number):
            worker.step(decode_sequences(sequences), lr, number)
        case Logprobs(sequences):
            worker.logprobs(decode_sequences(sequences))
        case Export(index):
            worker.export_parameter(index)
        case Snapshot(path, old_bytes, quantised):
            worker.snapshot.write(Path(path), old_bytes, quantised)
        case Save(folder, weights_only):
            (worker.save_weights if weights_only else worker.begin_save)(Path(folder))
        case Load(folder, weights_only):
            (worker.load_weights if weights_only else worker.load)(Path(folder))
        case LoadOptimizer(folder, steps):
            worker.load_optimizer(Path(folder), steps)
        case Close():
            pass
