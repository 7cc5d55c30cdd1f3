"""A trainer's copy on its device, here the CPU: the file and the digests are those that the host would make."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from multilinear_reference import digest

from physarum.weightsync.area import SharedArea
from physarum.weightsync.device.snapshot import FlatBuffer
from physarum.weightsync.errors import ManifestError
from physarum.weightsync.snapshot import Snapshot

CHUNK = 8192


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "embed": random(300, 33).to(torch.bfloat16),
        "norm": random(7),
        "scale": random(1),
        "transposed": random(40, 90).t(),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(0, 255, dtype=torch.uint8),
    }


@pytest.mark.parametrize("in_area", [True, False])
def test_the_file_and_the_digests_are_those_of_the_host(tmp_path: Path, in_area: bool) -> None:
    area = SharedArea(tmp_path / "area") if in_area else None
    buffer = FlatBuffer(CHUNK)
    for seed in (0, 1):
        named = tensors(seed)
        taken = buffer.take(named.items)
        for tensor in named.values():
            tensor.zero_()  # the model goes on training
        here = taken.on_host(area, f"trainer-{seed}")
        expected = Snapshot.take(tensors(seed).items(), CHUNK)
        entries, chunks = here.entries()
        plain, plain_chunks = expected.entries()
        assert [msgspec.structs.replace(one, device_digest="") for one in entries] == list(plain)
        for entry in entries:
            assert entry.device_digest == digest(bytes(here.file.tensor(entry.name)))
        assert chunks.keys() == plain_chunks.keys()
        assert {digest: bytes(data) for digest, data in chunks.items()} == {
            digest: bytes(data) for digest, data in plain_chunks.items()
        }
        assert here.total_bytes == expected.total_bytes
        here.close()
        expected.close()


def test_a_model_that_changes_its_tensors_is_refused() -> None:
    buffer = FlatBuffer(CHUNK)
    buffer.take({"a": torch.zeros(3)}.items)
    with pytest.raises(ManifestError, match="a is .*expected"):
        buffer.take({"a": torch.zeros(4)}.items)
    with pytest.raises(ManifestError, match="0 tensors were exported, expected 1"):
        buffer.take(dict[str, torch.Tensor]().items)
