"""What can go wrong in the trainer's torch side, one exception per meaning.

Invariant: every message names what was found, what was expected and the remedy: the actor reports it verbatim.
"""


class TrainerError(Exception):
    """Base of every error that the trainer's torch side raises on purpose."""


def describe(error: BaseException) -> str:
    """One line for the other ranks."""
    return f"{type(error).__name__}: {error}"


class BadSequence(TrainerError, ValueError):
    """A training sequence breaks the record's rules (lengths, ids, missing engine log-probabilities)."""


class SequenceTooLong(TrainerError, ValueError):
    """One sequence alone exceeds the token budget of a microbatch; the caller must account for it and leave it out.

    `index` is the sequence's index in the batch, `length` its tokens, `budget` the tokens that fit.
    """

    def __init__(self, index: int, length: int, budget: int) -> None:
        super().__init__(
            f"sequence {index} has {length} tokens, a microbatch holds at most {budget}; "
            "raise tokens_per_microbatch or drop the sequence"
        )
        self.index = index
        self.length = length
        self.budget = budget


class EmptyBatch(TrainerError, ValueError):
    """A step was asked for with no trainable token at all."""


class UnknownMegatronField(TrainerError, ValueError):
    """A `megatron:` key that no Megatron configuration has, has another type, or that belongs to another setting."""


class UnsupportedModel(TrainerError, ValueError):
    """The model folder is unreadable, or its architecture or a feature of it has no Megatron counterpart here."""


class UnsupportedParallelism(TrainerError, ValueError):
    """A combination of ranks and parallel sizes that this world cannot run."""


class NonFiniteStep(TrainerError, ArithmeticError):
    """Loss or gradient norm is inf or NaN: the step was refused and the weights are as they were.

    `metric` is "loss" or "grad_norm", `value` its value, `sequences` how many sequences the batch had.
    """

    def __init__(self, metric: str, value: float, sequences: int) -> None:
        super().__init__(
            f"{metric} is {value} over {sequences} sequences, expected a finite number; weights unchanged: "
            "inspect advantages and log-probabilities of this batch, or lower the learning rate"
        )
        self.metric = metric
        self.value = value
        self.sequences = sequences


class WorldStartError(TrainerError, RuntimeError):
    """A rank did not come up within the deadline."""


class RankFailed(TrainerError, RuntimeError):
    """A rank raised, died or did not answer within the deadline; the world is broken and must be started anew."""


class WorldClosed(TrainerError, RuntimeError):
    """The world was used before its start, after its end or after a rank failed."""


class ExportInterrupted(TrainerError, RuntimeError):
    """The weights changed while an export was being read: its tensors would mix two versions."""


class SnapshotNotTaken(TrainerError, OSError):
    """A version could not be written into the host's memory (no room for it); the world goes on, the file is incomplete."""


class WeightsNotQuantised(TrainerError, ValueError):
    """A weight is not finite, or of a shape that its scheme does not have: the version cannot take its engines' form."""


class StateNotWritten(TrainerError, OSError):
    """A training state could not be written (disk full, no permission); the world goes on, the folder is incomplete."""


class StateMismatch(TrainerError, ValueError):
    """A saved training state does not fit this world: other ranks, other shapes, other names, or damaged."""
