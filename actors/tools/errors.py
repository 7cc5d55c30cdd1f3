"""One exception per meaning; every message says what was found, what was expected and the remedy."""

from __future__ import annotations


class ToolError(Exception):
    """Base of what the tools raise on purpose."""


class NotInRunError(ToolError):
    """The run has no such step, sample, version, dead letter or checkpoint."""


class RunUnfitError(ToolError):
    """The run is not in a state in which this can be done (finished, live, stopped, without a trainer)."""


class SamplesMissingError(ToolError):
    """Samples that were asked for are neither in the log nor in the archive."""


class ArchiveAlteredError(ToolError):
    """An archive segment or an exported file is truncated, altered, or of another format."""


class BadLinesError(ToolError):
    """A file has lines that are no executions, or no rows; the message names each of the first."""


class CheckpointBadError(ToolError):
    """A checkpoint on disk is incomplete or altered."""


class ConversionError(ToolError):
    """Weights cannot be brought from one form into another: of another model, unreadable, or in the way of a folder."""
