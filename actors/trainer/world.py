"""Rank 0's handle on N ranks that train one model in lockstep.

Invariant: every method runs on all ranks or on none; a rank that dies, hangs or disagrees turns the pending call into a
named error within `timeout_s` and closes the world for good. A refused batch leaves the world usable and unchanged.

    caller's torch thread (rank 0)                 child processes (ranks 1 .. N-1)
    World.step(...)                                serve(): receive -> execute -> outcomes
      Channel.send(Step)      ==== gloo broadcast ===>
      Worker.step(...)        <=== collectives ======>   Worker.step(...)
      Channel.outcomes("")    <=== gloo all-gather ==>   Channel.outcomes("")

All methods block and belong to the one thread that called `start`; that thread must live as long as the world (the
ranks are killed when it ends).
"""

import datetime
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer.batch import Float32, StepResult, TrainSequence, encode_sequences
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
from physarum.actors.trainer.draft_layers import DraftLayers
from physarum.actors.trainer.errors import (
    BadSequence,
    EmptyBatch,
    ExportInterrupted,
    RankFailed,
    SequenceTooLong,
    StateMismatch,
    StateNotWritten,
    TrainerError,
    WorldClosed,
    WorldStartError,
    describe,
)
from physarum.actors.trainer.hf_folder import write_hf_folder
from physarum.actors.trainer.megatron import distributed
from physarum.actors.trainer.megatron.architectures import read_config
from physarum.actors.trainer.megatron.fit import check_fit
from physarum.actors.trainer.megatron.overrides import check_shareable, sort_overrides
from physarum.actors.trainer.megatron.routing import check_replay
from physarum.actors.trainer.rank_process import RankProcess
from physarum.actors.trainer.replay import replayed
from physarum.actors.trainer.worker import Worker
from physarum.actors.trainer.world_config import WorldConfig
from physarum.weightsync.quantisation.plan import Quantisation

__all__ = ["World", "WorldConfig"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOGPROB_ROUNDING = 1e-3
"""An engine's log-probability of a certain token may round to a little above 0."""
_CLOSE_GRACE_S = 10.0
"""How long a rank may take to leave after Close before it is killed."""
_DEATH_NOTICE_S = 0.5
"""A broken connection is noticed before the end of the process that held it; how long to wait for the latter."""


class World:
    """One Megatron world; make it with `World.start`."""

    def __init__(
        self,
        config: WorldConfig,
        worker: Worker,
        channel: Channel | None,
        children: list[RankProcess],
    ) -> None:
        self.config = config
        self._rank_0: Worker | None = worker
        self._channel = channel
        self._children = children
        self._weights_changed = 0

    @classmethod
    def start(cls, config: WorldConfig) -> Self:
        """Start the other ranks (within `start_timeout_s`) and build model and optimizer everywhere.

        Raises UnsupportedParallelism, UnsupportedModel, UnknownMegatronField before any process starts, and
        WorldStartError where a rank does not come up.
        """
        shape = distributed.Shape.of(config)
        distributed.check_parallelism(shape)
        sort_overrides(config.megatron)
        if config.checkpoint_format == "torch_dist":
            check_shareable(config.megatron)
        model = read_config(Path(config.hf_folder))
        check_fit(model, shape, config.megatron)
        check_replay(model, config.replay.routing, config.pp, config.megatron)
        DraftLayers(Path(config.hf_folder), model)  # they can be read
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host; its name need not resolve
        children: list[RankProcess] = []
        try:
            worker, channel = _build(config, children)
        except TrainerError:
            _end(children, 0.0)
            raise
        except (RuntimeError, OSError) as error:
            _end(children, 0.0)
            raise WorldStartError(
                f"the world did not come up (master_port {config.master_port}, start_timeout_s "
                f"{config.start_timeout_s}): {error}; free the port or look into the ranks' logs"
            ) from error
        logger.info("world of %s is ready", distributed.named(shape))
        return cls(config, worker, channel, children)

    def step(
        self, sequences: Sequence[TrainSequence], lr: float | None = None, number: int | None = None
    ) -> StepResult:
        """The optimizer steps of one batch. `lr` replaces the configured rate for it (warm-up applies); `number`: of the
        version that it leaves, where that is not how many batches this world has trained.

        Raises EmptyBatch, BadSequence or SequenceTooLong before anything is computed and NonFiniteStep after; in all
        four the weights are unchanged and the world goes on.
        """
        sequences = self._checked(sequences, needs_engine=self.config.objective == "rl")
        if not any(sequence.loss_mask.any() for sequence in sequences):
            raise EmptyBatch(f"none of {len(sequences)} sequences has a trained token; expected at least one")
        left = self._weights_changed + 1 if number is None else number
        result = self._call(
            lambda: Step(encode_sequences(sequences), lr, left), lambda: self._worker.step(sequences, lr, left)
        )
        self._weights_changed += 1
        return result

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32]:
        """The trainer's log-probability of every response token, one float32 [R] per sequence, in order."""
        sequences = self._checked(sequences, needs_engine=False)
        if not sequences:
            return []
        return self._call(lambda: Logprobs(encode_sequences(sequences)), lambda: self._worker.logprobs(sequences))

    @property
    def device(self) -> torch.device:
        """Rank 0's."""
        return self._worker.parallel.device

    def export(self, on_device: bool = False) -> Iterator[tuple[str, Tensor]]:
        """All weights under their Hugging Face names: contiguous host tensors of the model's dtype, one at a time.

        Routers' corrections are float32; draft layers come last, as the start model's folder has them. Each parameter is its
        own lockstep command and its own copy, so a slow or abandoned reader holds nobody up. With `on_device` they are where
        the weights are, perhaps their very memory: read each before the next, and all before a step.
        Raises ExportInterrupted where the weights changed in between.
        """
        version = self._weights_changed
        for index in range(len(self._worker.exported)):
            if version != self._weights_changed:
                raise ExportInterrupted(
                    f"the weights changed after {index} parameters of an export were read; "
                    "expected none to change: read the export to its end before the next step or load"
                )
            yield from self._export_one(index, on_device)
        for name, tensor in self._worker.drafts.tensors():
            yield name, tensor.to(self.device) if on_device else tensor

    def snapshot(self, path: Path, old_bytes: int, quantisation: Quantisation | None = None) -> int:
        """All weights as the safetensors file `path` of this host, each rank its share; its size.

        `old_bytes` of it are memory that is there (weightsync.area.Filling). Raises SnapshotNotTaken where any rank finds no
        room, WeightsNotQuantised: the file is incomplete, the world goes on.
        """
        options = quantisation.options if quantisation is not None else None
        return self._call(
            lambda: Snapshot(str(path), old_bytes, options),
            lambda: self._worker.snapshot.write(path, old_bytes, options),
        )

    def begin_save(self, folder: Path) -> Callable[[float], None]:
        """Takes the training state (weights, optimizer, schedule, generators) and goes on writing it into `folder` beside what
        follows; no other save may begin meanwhile.

        Call what is returned with a timeout in seconds, in any thread: once it returns the files are flushed to disk. It
        raises StateNotWritten where any rank could not write; the world goes on.
        """
        self._call(lambda: Save(str(folder)), lambda: self._worker.begin_save(folder))
        return self._worker.writing.written

    def save(self, folder: Path) -> None:
        """The same, and waits for it."""
        self.begin_save(folder)(self.config.timeout_s)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote: in a world of the same shape the next step is bit-equal. Raises StateMismatch, of another
        shape unless the state is torch_dist."""
        self._call(lambda: Load(str(folder)), lambda: self._worker.load(folder))
        self._weights_changed += 1

    def save_weights(self, folder: Path) -> None:
        """The policy's weights alone into `folder`, in Megatron's torch_dist format. Raises StateNotWritten."""
        self._call(lambda: Save(str(folder), True), lambda: self._worker.save_weights(folder), StateNotWritten)

    def load_weights(self, folder: Path) -> set[str]:
        """The policy's weights alone from a torch_dist folder, whoever wrote it; the names of the tensors that rank 0 read.

        To be exported, not trained: the optimizer's masters stay as they were. Raises StateMismatch.
        """
        taken = self._call(lambda: Load(str(folder), True), lambda: self._worker.load_weights(folder))
        self._weights_changed += 1
        return taken

    def load_optimizer(self, folder: Path, steps: int | None = None) -> int:
        """The policy's optimizer from a torch_dist folder, whoever wrote it; the steps that it had made.

        Its weights must be the model's. `steps`: where the folder does not tell. Raises StateMismatch.
        """
        return self._call(
            lambda: LoadOptimizer(str(folder), steps), lambda: self._worker.load_optimizer(folder, steps), StateMismatch
        )

    def save_hf(self, folder: Path, quantisation: Quantisation | None = None) -> None:
        """The model as a Hugging Face folder: safetensors, config, the start model's tokenizer. Raises QuantisationError."""
        write_hf_folder(Path(self.config.hf_folder), folder, self.export(), quantisation)

    def close(self) -> None:
        """End the other ranks and leave the process group; may be called twice."""
        if self._rank_0 is None:
            return
        self._rank_0.writing.join(self.config.timeout_s)
        grace_s = _CLOSE_GRACE_S
        if self._channel is not None:
            try:
                self._channel.send(Close())
            except RuntimeError as error:
                logger.warning("a rank did not take its dismissal (%s); it is killed", error)
                grace_s = 0.0
        self._shut(grace_s)

    def _export_one(self, index: int, on_device: bool) -> list[tuple[str, Tensor]]:
        if self._worker.exported[index].holders(self._worker.parallel) == range(1):  # rank 0 has it whole
            return self._worker.export_parameter(index, on_device)
        return self._call(lambda: Export(index), lambda: self._worker.export_parameter(index, on_device))

    def _call(
        self, command: Callable[[], Command], local: Callable[[], T], partial: type[TrainerError] | None = None
    ) -> T:
        """Send, do rank 0's part, compare outcomes. Refusals are raised as they are, all else closes the world.

        A refusal by some ranks only closes it too, unless `partial` says which error that is (nothing was changed).
        """
        _ = self._worker  # it is open
        refusal: TrainerError | None = None
        result: T | None = None
        try:
            if self._channel is not None:
                self._channel.send(command())
            try:
                result = local()
            except TrainerError as error:
                refusal = error
            outcomes = self._channel.outcomes(describe(refusal) if refusal else "") if self._channel else []
        except Exception as error:
            raise self._broken(describe(error)) from error
        if len({bool(outcome) for outcome in outcomes}) > 1:
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text)
            raise self._broken(texts) if partial is None else partial(texts)
        if refusal is not None:
            raise refusal
        return result  # type: ignore[return-value]

    def _checked(self, sequences: Sequence[TrainSequence], needs_engine: bool) -> list[TrainSequence]:
        """The sequences, with what is replayed of their records."""
        budget = self.config.tokens_per_microbatch
        vocabulary = self._worker.model.vocab_size
        for index, sequence in enumerate(sequences):
            if sequence.length > budget:
                raise SequenceTooLong(index, sequence.length, budget)
            lowest, highest = int(sequence.token_ids.min()), int(sequence.token_ids.max())
            if lowest < 0 or highest >= vocabulary:
                raise BadSequence(
                    f"sequence {index} has token ids {lowest} to {highest}; expected 0 to {vocabulary - 1}"
                )
            if needs_engine and not _valid_logprobs(sequence.engine_logprobs[sequence.loss_mask]):
                raise BadSequence(
                    f"sequence {index} has a trained token without a valid engine log-probability "
                    "(not finite or above 0); expected one at or below 0: mask the token"
                )
        return replayed(sequences, self.config.replay, self._worker.model.routing, vocabulary)

    @property
    def _worker(self) -> Worker:
        if self._rank_0 is None:
            raise WorldClosed("this world was closed or broke; start a new one and load the last training state")
        return self._rank_0

    def _broken(self, reason: str) -> RankFailed:
        """Close for good and say which ranks are gone."""
        gone = [
            f"rank {child.rank} ended with code {child.exit_code}"
            for child in self._children
            if child.ended_within(_DEATH_NOTICE_S)
        ]
        self._shut(grace_s=0.0)
        return RankFailed(
            f"{'; '.join(gone) or 'no rank has ended'}; {reason}. Expected all {self.config.ranks} ranks to finish the "
            "command: start a new world and load the last training state"
        )

    def _shut(self, grace_s: float) -> None:
        if self._rank_0 is not None:
            self._rank_0.writing.abandon()
        self._rank_0 = None
        _end(self._children, grace_s)


def _build(config: WorldConfig, children: list[RankProcess]) -> tuple[Worker, Channel | None]:
    """Start the other ranks into `children` and rank 0's own part; the channel is None where rank 0 is alone."""
    deadline = datetime.timedelta(seconds=config.start_timeout_s)
    store = dist.TCPStore("127.0.0.1", config.master_port, is_master=True, timeout=deadline, wait_for_workers=False)
    children.extend(RankProcess(config, rank, store.port) for rank in range(1, config.ranks))
    _await_ranks(store, children, deadline)
    worker = Worker(config, store, 0)
    if not children:
        return worker, None
    channel = Channel(config.timeout_s)
    channel.outcomes("")
    return worker, channel


def _await_ranks(store: dist.TCPStore, children: list[RankProcess], deadline: datetime.timedelta) -> None:
    """Until every child said "up"; raises WorldStartError where one ended first, RuntimeError at the deadline."""
    for child in children:
        key = f"rank/{child.rank}"
        store.wait([key], deadline)
        word = store.get(key).decode()
        if word != "up":
            raise WorldStartError(f"rank {child.rank} ended with {word} before it joined; its log says why")


def _end(children: list[RankProcess], grace_s: float) -> None:
    for child in children:
        child.end(grace_s)
    distributed.destroy()


def _valid_logprobs(logprobs: Float32) -> bool:
    return bool((np.isfinite(logprobs) & (logprobs < _LOGPROB_ROUNDING)).all())
