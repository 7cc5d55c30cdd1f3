"""Training state on disk: an exact round trip, and damage that is named."""

from pathlib import Path

import pytest
import torch

from physarum.actors.trainer.errors import StateMismatch
from physarum.actors.trainer.state import read_state, write_state


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    tree = {
        "model": {"a": shared, "view": shared[0], "empty": torch.zeros(0, 3), "scalar": torch.tensor(3.0)},
        "state": {0: {"step": torch.tensor(2.0)}, 1: {"exp_avg": torch.tensor([1.5], dtype=torch.bfloat16)}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "flag": True, "params": [0, 1]}],
        "nested": (1, (2, torch.tensor([7], dtype=torch.uint8)), "text", b"bytes"),
        "nan": torch.tensor([float("nan"), -0.0]),
    }
    write_state(tree, tmp_path, "share")
    back = read_state(tmp_path, "share")
    assert _plain(back) == _plain(tree)
    assert type(back["groups"][0]["flag"]) is bool
    assert type(back["groups"][0]["betas"]) is tuple


def _plain(node: object) -> object:
    """Tensors as (type, shape, bytes): equal only where bit-equal."""
    if isinstance(node, torch.Tensor):
        contiguous = node.contiguous()
        raw = contiguous.reshape(-1).view(torch.uint8) if contiguous.numel() else contiguous.to(torch.uint8)
        return str(node.dtype), tuple(node.shape), raw.flatten().tolist()
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_plain(value) for value in node)
    return node


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateMismatch, match=r"'share' in .* is unreadable"):
        read_state(tmp_path, "share")
    write_state({"a": torch.zeros(4), "b": 1}, tmp_path, "share")
    for name in ("share.safetensors", "share.msgpack"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-1])
        with pytest.raises(StateMismatch, match="choose another checkpoint"):
            read_state(tmp_path, "share")
        (tmp_path / name).write_bytes(whole)
    assert read_state(tmp_path, "share")["b"] == 1


def test_what_is_neither_tensor_nor_plain_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="holds a set"):
        write_state({"a": {1, 2}}, tmp_path, "share")
