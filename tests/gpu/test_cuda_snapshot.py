"""A version on its way from the device into a file: what is there, and both sides' digests, are those that the host would make.
Tensors are larger than what is copied at once, and others end in the middle of a row."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from physarum.weightsync.area import SharedArea  # noqa: E402
from physarum.weightsync.device.snapshot import FlatBuffer  # noqa: E402
from physarum.weightsync.snapshot import Snapshot  # noqa: E402

CHUNK = 4 << 20


def _tensors(seed: int) -> dict[str, object]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    sizes = {"embedding": 600 << 20, "odd": 12_345_677, "empty": 0, "small": 3, "layer": 70 << 20}
    return {
        name: torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda", generator=generator)
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("where", ["memory", "disk", "nowhere"])
def test_the_file_and_both_digests_are_those_of_the_host(tmp_path: Path, where: str) -> None:
    """In shared memory files are page-locked; on a disk they cannot be, and nothing that failed there may fail later."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        places = {"memory": Path(memory), "disk": tmp_path, "nowhere": None}
        place = places[where]
        _check(SharedArea(place / "area") if place is not None else None)


def _check(area: SharedArea | None) -> None:
    buffer = FlatBuffer(CHUNK)
    for seed in (0, 1, 2):
        tensors = _tensors(seed)
        taken = buffer.take(tensors.items)
        for tensor in tensors.values():
            tensor.zero_()  # the model goes on training
        here = taken.on_host(area, f"trainer-{seed}")
        expected = Snapshot.take(_tensors(seed).items(), CHUNK)
        found, chunks = here.entries()
        plain, _ = expected.entries()
        assert [msgspec.structs.replace(one, device_digest="") for one in found] == list(plain)
        assert all(one.device_digest for one in found)
        assert sum(data.nbytes for data in chunks.values()) <= here.total_bytes == expected.total_bytes
        here.close()
        expected.close()
