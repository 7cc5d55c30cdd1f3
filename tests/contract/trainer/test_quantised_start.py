"""A real trainer between a quantised start model and quantised versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from physarum.actors.trainer.errors import UnsupportedModel
from physarum.actors.trainer.hf_folder import write_hf_folder
from physarum.actors.trainer.world import World, WorldConfig
from physarum.bus.version import Version
from physarum.weightsync.device.snapshot import FlatBuffer
from physarum.weightsync.layout import check_fits, forms_in
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.quantisation.plan import Quantisation
from physarum.weightsync.quantisation.presets import preset
from physarum.weightsync.quantisation.reading import folder_tensors
from physarum.weightsync.snapshot import Snapshot

pytestmark = pytest.mark.timeout(60)

Folder = Callable[..., Path]


def manifest_of(snapshot: Snapshot) -> Manifest:
    tensors, _ = snapshot.entries()
    return Manifest(
        version=Version("policy", 1, 0), parent=None, model_digest="m", tensors=tensors, total_bytes=snapshot.total_bytes,
        step=0, created=0.0,
    )  # fmt: skip


def check_same(snapshot: Snapshot, folder: Path) -> None:
    """Bit-equal but for the last bits of scales."""
    for name, tensor in folder_tensors(folder):
        again = torch.frombuffer(bytearray(snapshot.file.tensor(name)), dtype=tensor.dtype).reshape(tensor.shape)
        if tensor.dtype is torch.float32:
            assert torch.allclose(again, tensor, rtol=1e-6), name
        else:
            assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_a_trainer_starts_from_what_it_publishes(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """FP8 that was dequantised gives the same codes again, so the first version is the start model. INT4 need not: its largest
    positive code is 7 of 7.5."""
    start = model_folder(tied=False)
    write_hf_folder(start, tmp_path, folder_tensors(start), preset(name))
    plan = Quantisation.in_folder(tmp_path)
    assert plan is not None
    world = World.start(WorldConfig(hf_folder=str(tmp_path)))
    try:
        trained = dict(world.export())
        plain = dict(folder_tensors(start))
        assert trained.keys() == plain.keys()
        assert all(float((trained[one] - plain[one]).abs().max()) < 0.1 for one in plain)
        by_host = Snapshot.take(plan.tensors(world.export()))
        by_device = (
            FlatBuffer(1 << 20).take(lambda: plan.tensors(world.export(on_device=True))).on_host(None, "version")
        )
    finally:
        world.close()
    manifest = manifest_of(by_host)
    check_fits(manifest, forms_in(tmp_path))
    assert [msgspec.structs.replace(one, device_digest="") for one in manifest_of(by_device).tensors] == list(
        manifest.tensors
    )
    if name == "fp8":
        check_same(by_host, tmp_path)
    by_host.close()
    by_device.close()


def test_weights_whose_scales_nobody_names_are_refused(model_folder: Folder, tmp_path: Path) -> None:
    start = model_folder()
    write_hf_folder(start, tmp_path, folder_tensors(start), preset("fp8"))
    (tmp_path / "config.json").write_text((start / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match="does not say how it was quantised"):
        World.start(WorldConfig(hf_folder=str(tmp_path)))
