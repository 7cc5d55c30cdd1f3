"""Of each execution, the samples of one policy, where several are trained: what its trainer and its evaluation see.

Invariant: headers and bodies are cut in the same way, so that the numbers of samples in a plan mean the same in both. An
execution that has none is an execution without samples, which the planner drops as `absent`.
"""

from __future__ import annotations

import msgspec

from physarum.bus.records import Execution, ExecutionHeader
from physarum.configs.root import RootConfig


class OwnSamples:
    """`model`: whose; None: everything is, in a run that trains one policy."""

    def __init__(self, model: str | None) -> None:
        self._model = model

    @classmethod
    def of(cls, config: RootConfig) -> OwnSamples:
        """Of the policy whose view `config` is."""
        return cls(config.model.name if config.policies else None)

    def header(self, header: ExecutionHeader) -> ExecutionHeader:
        """With the policy's samples only."""
        if self._model is None:
            return header
        return msgspec.structs.replace(header, samples=[one for one in header.samples if one.policy == self._model])

    def execution(self, execution: Execution) -> Execution:
        """`execution` itself, left with the policy's samples."""
        if self._model is not None:
            execution.samples = [one for one in execution.samples if one.policy == self._model]
        return execution
