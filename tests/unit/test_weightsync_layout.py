"""A folder filled from chunks is a safetensors file that others read; one that does not fit the model is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from physarum.bus.version import Version
from physarum.weightsync.errors import ManifestError, UpdateRefusedError
from physarum.weightsync.layout import FILE_NAME, Form, check_fits, forms_in
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.publisher import Snapshot
from physarum.weightsync.staging import Part, remove_others

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
def test_file_filled_in_any_order_equals_the_tensors(tmp_path: Path, chunk_bytes: int) -> None:
    manifest, chunks = manifest_of(Snapshot.take(TENSORS.items(), chunk_bytes))
    part = Part(tmp_path, manifest)
    for digest, data in reversed(chunks.items()):
        part.write(digest, bytes(data))
    held = part.complete()
    loaded = load_file(held.folder / FILE_NAME)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert forms_in(held.folder) == {
        name: Form(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in TENSORS.items()
    }
    assert all(held.read(digest) == bytes(data) for digest, data in chunks.items())


def test_equal_contents_are_one_chunk() -> None:
    manifest, chunks = manifest_of(Snapshot.take(TENSORS.items()))
    assert len(chunks) == 4 and sum(map(len, chunks.values())) == 48 + 4 + 4 + 48
    assert manifest.total_bytes == 48 + 4 + 4 + 48 + 48


def test_snapshot_shares_no_memory_with_the_model() -> None:
    weight = torch.ones(4)
    snapshot = Snapshot.take([("w", weight)])
    weight.zero_()
    assert bytes(snapshot.tensors[0].data) == torch.ones(4).numpy().tobytes()


def test_held_chunk_that_was_altered_is_not_offered(tmp_path: Path) -> None:
    manifest, chunks = manifest_of(Snapshot.take(TENSORS.items()))
    part = Part(tmp_path, manifest)
    for digest, data in chunks.items():
        part.write(digest, bytes(data))
    held = part.complete()
    (held.folder / FILE_NAME).write_bytes(b"\0" * (held.folder / FILE_NAME).stat().st_size)
    assert all(held.read(digest) is None for digest in chunks)
    assert held.read("0" * 32) is None


def test_discarded_part_is_gone_and_refuses_a_late_write(tmp_path: Path) -> None:
    manifest, chunks = manifest_of(Snapshot.take(TENSORS.items()))
    part = Part(tmp_path, manifest)
    part.discard()
    with pytest.raises(UpdateRefusedError, match="was given up"):
        part.write(*next((digest, bytes(data)) for digest, data in chunks.items()))
    assert list(tmp_path.iterdir()) == []


def test_other_folders_are_removed(tmp_path: Path) -> None:
    for name in ("policy@1.1", "policy@1.2", ".part-policy@1.3"):
        (tmp_path / name).mkdir()
    remove_others(tmp_path, keep=lambda folder: folder.name == "policy@1.2")
    assert [folder.name for folder in tmp_path.iterdir()] == ["policy@1.2"]


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
