"""One rank's part of a version: what it brings goes to its places in the version's file, beside what the other ranks bring.

Invariant: every rank knows the same layout (it is made of what all ranks said of their parts), so each byte has one writer,
and no rank ever holds the model, nor waits for another but to put one parameter's shards together.
"""

from pathlib import Path

import msgspec

from physarum.actors.trainer.errors import SnapshotNotTaken
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.exchange import from_all
from physarum.actors.trainer.megatron.exporting import Exported
from physarum.actors.trainer.megatron.model import Model
from physarum.actors.trainer.megatron.shares import own_share
from physarum.weightsync.area import Filling
from physarum.weightsync.errors import ManifestError, NoRoomError
from physarum.weightsync.layout import Form, Layout, lay_out
from physarum.weightsync.snapshot import form_of, write_tensor

Part = tuple[int, list[tuple[str, Form]]]
"""A parameter's place in export order, and what it is in Hugging Face's terms."""


class RankSnapshot:
    """Of one rank; made with its world."""

    def __init__(self, model: Model, exported: list[Exported], parallel: Parallel) -> None:
        self._model, self._exported, self._parallel = model, exported, parallel
        self._layout: Layout | None = None

    def write(self, path: Path, old_bytes: int) -> int:
        """Brings this rank's share into the file, rank 0 the header, too; the file's size. Collective.

        Raises SnapshotNotTaken without room, or when the file was taken away: it is incomplete then. ManifestError for a
        tensor that cannot be published.
        """
        layout = self._known_layout()
        try:
            filling = Filling.joined(path, old_bytes)
            try:
                self._fill(filling, layout)
            finally:
                filling.close()
        except NoRoomError as error:
            raise SnapshotNotTaken(str(error)) from error
        return layout.size_bytes

    def _fill(self, filling: Filling, layout: Layout) -> None:
        """A rank without room goes on with the others: they wait for its shards."""
        failure: NoRoomError | None = None
        for _, named in own_share(self._model, self._exported, self._parallel):
            for name, tensor in named:
                try:
                    if failure is None:
                        write_tensor(filling, name, tensor, layout.offsets[name])
                except NoRoomError as error:
                    failure = error
        if self._parallel.rank == 0:
            filling.write(layout.header, 0)
        if failure is not None:
            raise failure

    def _known_layout(self) -> Layout:
        """The first time all ranks look at what they would bring, and tell each other."""
        if self._layout is None:
            own = [
                (index, [(name, form_of(name, tensor)) for name, tensor in named])
                for index, named in own_share(self._model, self._exported, self._parallel)
            ]
            parts = [part for data in from_all(msgspec.msgpack.encode(own)) for part in _parts(data)]
            self._layout = lay_out(_forms(parts), "")
        return self._layout


def _parts(data: bytes) -> list[Part]:
    return msgspec.msgpack.decode(data, type=list[Part])


def _forms(parts: list[Part]) -> dict[str, Form]:
    """In export order. Raises ManifestError for a name that two parameters have."""
    forms: dict[str, Form] = {}
    for _, named in sorted(parts, key=lambda part: part[0]):
        for name, form in named:
            if name in forms:
                raise ManifestError(f"tensor {name} is exported twice")
            forms[name] = form
    return forms
