"""One rank's part of a version: what it brings goes to its places in the version's file, beside what the other ranks bring.

Invariant: every rank knows the same layout (it is made of what all ranks said of their parts), so each byte has one writer,
and no rank ever holds the model, nor waits for another but to put one parameter's shards together.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from physarum.actors.trainer.draft_layers import DraftLayers
from physarum.actors.trainer.errors import SnapshotNotTaken, WeightsNotQuantised
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.exchange import from_all
from physarum.actors.trainer.megatron.exporting import Exported
from physarum.actors.trainer.megatron.model import Model
from physarum.actors.trainer.megatron.shares import own_share
from physarum.weightsync.area import Filling
from physarum.weightsync.errors import ManifestError, NoRoomError, QuantisationError
from physarum.weightsync.layout import Form, Layout, lay_out
from physarum.weightsync.quantisation.plan import Quantisation
from physarum.weightsync.snapshot import form_of, write_tensor

Take = Callable[[int, str, Tensor], None]
"""Of a parameter's place in export order, and one tensor of it."""
_UNREADABLE = (OSError, KeyError, SafetensorError, QuantisationError)
"""What reading draft layers raises."""


class _Outcome(msgspec.Struct, frozen=True):
    """Of one rank: why it failed, and what it would bring: (place in export order, name, form)."""

    no_room: str = ""
    not_quantised: str = ""
    broken: str = ""
    brings: list[tuple[int, str, Form]] = []


class RankSnapshot:
    """Of one rank; made with its world."""

    def __init__(self, model: Model, exported: list[Exported], parallel: Parallel, drafts: DraftLayers) -> None:
        self._model, self._exported, self._parallel, self._drafts = model, exported, parallel, drafts
        self._quantisation: Quantisation | None = None
        self._layout: Layout | None = None

    def write(self, path: Path, old_bytes: int, quantised: dict[str, Any] | None = None) -> int:
        """Brings this rank's share into the file, rank 0 the header, too; the file's size. Collective, `quantised` (a
        quantization_config) the same on all ranks.

        Raises SnapshotNotTaken without room on any rank, or when the file was taken away; WeightsNotQuantised; on all ranks
        alike. RuntimeError where a rank cannot read or publish its share, on all as well: the others do not wait for it.
        """
        if self._layout is None or (self._quantisation.options if self._quantisation else None) != quantised:
            self._quantisation = Quantisation.of(quantised) if quantised is not None else None
            self._layout = self._described()
        layout = self._layout
        self._agree(self._fill(path, old_bytes, layout))
        return layout.size_bytes

    def _described(self) -> Layout:
        """All ranks look at what they would bring, and tell each other."""
        brings: list[tuple[int, str, Form]] = []
        failed = self._visit(lambda index, name, tensor: brings.append((index, name, form_of(name, tensor))))
        outcomes = self._agree(msgspec.structs.replace(failed, brings=brings))
        return lay_out(_forms([one for outcome in outcomes for one in outcome.brings]), "")

    def _fill(self, path: Path, old_bytes: int, layout: Layout) -> _Outcome:
        """A rank without a file goes through its share all the same: others wait for its shards."""
        try:
            filling = Filling.joined(path, old_bytes)
        except NoRoomError as error:
            self._visit(lambda index, name, tensor: None)
            return _Outcome(no_room=str(error))
        try:
            found = self._visit(lambda index, name, tensor: _put(filling, name, tensor, layout))
            if self._parallel.rank == 0 and found == _Outcome():
                filling.write(layout.header, 0)
            return found
        except NoRoomError as error:
            return _Outcome(no_room=str(error))
        finally:
            filling.close()

    def _visit(self, take: Take) -> _Outcome:
        """Gives all of this rank's share to `take` until it fails; the rest is gone through for the other ranks' sake."""
        failed = _Outcome()
        try:
            for index, named in self._share():
                failed = failed if failed != _Outcome() else self._given(take, index, named)
        except _UNREADABLE as error:  # draft layers come last: nobody waits for shards of them
            failed = failed if failed != _Outcome() else _outcome_of(error)
        return failed

    def _given(self, take: Take, index: int, named: list[tuple[str, Tensor]]) -> _Outcome:
        try:
            for name, tensor in named if self._quantisation is None else self._quantisation.tensors(named):
                take(index, name, tensor)
        except (NoRoomError, QuantisationError, ManifestError) as error:
            return _outcome_of(error)
        return _Outcome()

    def _share(self) -> Iterator[tuple[int, list[tuple[str, Tensor]]]]:
        """Of the model, and after it of the draft layers, which every rank can read."""
        yield from own_share(self._model, self._exported, self._parallel)
        for place, one in enumerate(self._drafts.tensors(self._parallel.rank, self._parallel.ranks)):
            yield len(self._exported) + place * self._parallel.ranks + self._parallel.rank, [one]

    def _agree(self, own: _Outcome) -> list[_Outcome]:
        """What all ranks say; all raise the same."""
        outcomes = [msgspec.msgpack.decode(data, type=_Outcome) for data in from_all(msgspec.msgpack.encode(own))]
        for outcome in outcomes:
            if outcome.not_quantised:
                raise WeightsNotQuantised(outcome.not_quantised)
            if outcome.no_room:
                raise SnapshotNotTaken(outcome.no_room)
            if outcome.broken:
                raise RuntimeError(f"a rank's share of a version cannot be brought: {outcome.broken}")
        return outcomes


def _outcome_of(error: Exception) -> _Outcome:
    match error:
        case NoRoomError():
            return _Outcome(no_room=str(error))
        case QuantisationError():
            return _Outcome(not_quantised=str(error))
        case _:
            return _Outcome(broken=f"{type(error).__name__}: {error}")


def _put(filling: Filling, name: str, tensor: Tensor, layout: Layout) -> None:
    write_tensor(filling, name, tensor, layout.offsets[name])


def _forms(brings: list[tuple[int, str, Form]]) -> dict[str, Form]:
    """In export order. Raises ManifestError for a name that two parameters have."""
    forms: dict[str, Form] = {}
    for _, name, form in sorted(brings, key=lambda one: one[0]):
        if name in forms:
            raise ManifestError(f"tensor {name} is exported twice")
        forms[name] = form
    return forms
