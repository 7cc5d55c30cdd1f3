"""A version is a safetensors file that others read; one that does not fit the model is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from physarum.bus.version import Version
from physarum.weightsync import snapshot as snapshots
from physarum.weightsync.area import SharedArea
from physarum.weightsync.digest import digest_of
from physarum.weightsync.errors import ManifestError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.layout import FILE_NAME, Form, check_fits, forms_in
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.snapshot import Snapshot

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c.scale": torch.tensor(7.0),
    "d.weight": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "e.transposed": torch.arange(6).reshape(2, 3).t(),
    "f.empty": torch.zeros(0, 4),
}


def manifest_of(snapshot: Snapshot) -> tuple[Manifest, dict[str, memoryview]]:
    entries, chunks = snapshot.entries()
    version = Version("policy", 1, 1)
    total = snapshot.total_bytes
    plain = Manifest(
        version=version, parent=None, model_digest="m", tensors=entries, total_bytes=total, step=0, created=0.0
    )
    return plain, chunks


@pytest.mark.parametrize("chunk_bytes", [5, 1 << 20])
def test_a_snapshot_is_a_file_that_others_read(tmp_path: Path, chunk_bytes: int) -> None:
    area = SharedArea(tmp_path)
    snapshot = Snapshot.take(TENSORS.items(), chunk_bytes, area, "one")
    manifest, _ = manifest_of(snapshot)
    held = area.hold("one", manifest.label)
    assert held is not None
    loaded = load_file(held)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert forms_in(held.parent) == {
        name: Form(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in TENSORS.items()
    }
    with HeldFile.open(area, manifest.label) as file:  # type: ignore[union-attr]
        for digest, (offset, size) in file.places(manifest).items():
            assert digest_of(file.slice(offset, size)) == digest


def test_data_move_when_the_header_outgrows_its_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(snapshots, "_HEADER_ROOM", 64)
    monkeypatch.setattr(snapshots, "_PIECE_BYTES", 7)
    area = SharedArea(tmp_path)
    Snapshot.take(TENSORS.items(), 16, area, "one")
    held = area.hold("one", "policy@1.1")
    assert held is not None
    loaded = load_file(held)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_tensor_that_is_exported_twice_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="tensor w is exported twice"):
        Snapshot.take([("w", torch.ones(1)), ("w", torch.ones(1))], 16, SharedArea(tmp_path), "one")
    assert list((tmp_path / "filling").iterdir()) == []


def test_equal_contents_are_one_chunk() -> None:
    manifest, chunks = manifest_of(Snapshot.take(TENSORS.items()))
    assert len(chunks) == 4 and sum(map(len, chunks.values())) == 48 + 4 + 4 + 48
    assert manifest.total_bytes == 48 + 4 + 4 + 48 + 48


def test_snapshot_shares_no_memory_with_the_model() -> None:
    weight = torch.ones(4)
    snapshot = Snapshot.take([("w", weight)])
    weight.zero_()
    assert bytes(snapshot.file.tensor("w")) == torch.ones(4).numpy().tobytes()


def test_versions_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / FILE_NAME)
    expected = forms_in(tmp_path)
    manifest, _ = manifest_of(Snapshot.take(TENSORS.items()))
    check_fits(manifest, expected)
    with pytest.raises(ManifestError, match=r"1 are absent \['new'\]"):
        check_fits(manifest, {**expected, "new": Form("float32", (1,))})
    with pytest.raises(ManifestError, match=r"1 are unknown \['c\.scale'\]"):
        check_fits(manifest, {name: form for name, form in expected.items() if name != "c.scale"})
    with pytest.raises(ManifestError, match=r"a\.weight has shape \(3, 4\), the engine's has \(2, 2\)"):
        check_fits(manifest, {**expected, "a.weight": Form("float32", (2, 2))})


def test_folder_without_readable_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="holds no safetensors file"):
        forms_in(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"\xff" * 40)
    with pytest.raises(ManifestError, match="is no safetensors file"):
        forms_in(tmp_path)


def test_types_that_an_engine_does_not_convert_must_be_equal() -> None:
    manifest, _ = manifest_of(Snapshot.take([("w", torch.ones(4)), ("w_scale", torch.ones(1))]))
    check_fits(manifest, {"w": Form("bfloat16", (4,)), "w_scale": Form("float8_e8m0fnu", (1,))})
    with pytest.raises(
        ManifestError, match=r"tensor w is float32, the engine's is float8_e4m3fn: one of them is quantised"
    ):
        check_fits(manifest, {"w": Form("float8_e4m3fn", (4,)), "w_scale": Form("float32", (1,))})
