"""What one rank cannot bring into a version it tells the others, which would wait for it as long as a step may take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from physarum.actors.trainer import rank_snapshot
from physarum.actors.trainer.errors import WeightsNotQuantised
from physarum.actors.trainer.rank_snapshot import RankSnapshot
from physarum.weightsync.errors import QuantisationError

Named = tuple[str, torch.Tensor]


class Drafts:
    """Draft layers of which one can be read."""

    def __init__(self, then: Exception | None, name: str = "draft", dtype: torch.dtype = torch.float32) -> None:
        self._then, self._first = then, (name, torch.zeros(2, dtype=dtype))

    def tensors(self, first: int, step: int) -> Iterator[Named]:
        yield self._first
        if self._then is not None:
            raise self._then


@pytest.mark.parametrize(
    ("drafts", "kind", "words"),
    [
        (Drafts(OSError("model.safetensors is gone")), RuntimeError, "OSError: model.safetensors is gone"),
        (Drafts(KeyError("layers.9.weight")), RuntimeError, "KeyError: 'layers.9.weight'"),
        (Drafts(QuantisationError("it has no scale")), WeightsNotQuantised, "it has no scale"),
        (Drafts(None, dtype=torch.complex64), RuntimeError, "ManifestError: tensor draft"),
    ],
)
def test_what_a_rank_cannot_bring_is_told_to_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drafts: Drafts, kind: type[Exception], words: str
) -> None:
    told: list[dict[str, Any]] = []

    def from_all(data: bytes) -> list[bytes]:
        told.append(msgspec.msgpack.decode(data))
        return [data]

    monkeypatch.setattr(rank_snapshot, "from_all", from_all)
    monkeypatch.setattr(rank_snapshot, "own_share", lambda *given: iter(()))
    parallel = SimpleNamespace(rank=0, ranks=1)
    with pytest.raises(kind) as raised:
        RankSnapshot(cast(Any, None), [], cast(Any, parallel), cast(Any, drafts)).write(tmp_path / "file", 0)
    assert words in str(raised.value)
    assert len(told) == 1
