"""An engine's end of checkpoint-engine's protocol, run in the engine's own Python; prints one JSON line for each model.

    python handle_receiver.py KIND ADDRESS MODELS [FAILS_AT]

KIND plain: the protocol as written in weightsync/device/handles.py. KIND package: the receiver of the installed package
checkpoint-engine, called by SGLang's own worker extension; only what asks for a CUDA device is replaced. FAILS_AT load: the
model refuses its weights; map: the buffer cannot be mapped.
"""

from __future__ import annotations

import hashlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import zmq

NAME = "GPU-of-the-test"


class Model:
    """Remembers what it was given."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at
        self.seen: dict[str, Any] = {}
        self.hooked = False

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        if self.fails_at == "load":
            raise ValueError("no parameter of that name")
        for name, tensor in weights:
            digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            self.seen[name] = [str(tensor.dtype), list(tensor.shape), digest]

    def named_modules(self) -> list[Any]:
        return []

    def post_load_weights(self) -> None:
        self.hooked = True


def plain(address: str, model: Model, context: zmq.Context[Any]) -> None:
    socket = context.socket(zmq.REP)
    socket.connect(address)
    rebuild, arguments = socket.recv_pyobj()
    if model.fails_at == "map":
        socket.send_string("cannot map it")
        socket.recv()
        raise ValueError("cannot map it")
    buffer = rebuild(*arguments)
    socket.send(b"")
    payload = socket.recv_pyobj()
    try:
        sizes = [one["dtype"].itemsize * one["shape"].numel() for one in payload]
        pieces = [buffer[one["offset"] : one["offset"] + size] for one, size in zip(payload, sizes, strict=True)]
        model.load_weights(
            [
                (one["name"], piece.view(one["dtype"]).view(one["shape"]))
                for one, piece in zip(payload, pieces, strict=True)
            ]
        )
    except ValueError as error:
        socket.send_string(str(error))
        raise socket.recv_pyobj() from error
    socket.send(b"")
    for _ in range(2):
        assert socket.recv_pyobj() is None
        socket.send(b"")
    model.post_load_weights()
    socket.close(linger=1000)


def package(address: str, model: Model, context: zmq.Context[Any]) -> None:
    import checkpoint_engine.worker as worker
    from sglang.srt.checkpoint_engine.checkpoint_engine_worker import SGLangCheckpointEngineWorkerExtensionImpl

    class WithoutCard(SGLangCheckpointEngineWorkerExtensionImpl):
        def get_device_uuid(self) -> str:
            return NAME

        def get_device_id(self) -> None:  # type: ignore[override]
            return None

    nothing = SimpleNamespace(synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None)
    worker.DeviceManager = lambda: SimpleNamespace(device_module=nothing)
    WithoutCard(SimpleNamespace(model=model)).update_weights_from_ipc({NAME: address})


def main() -> None:
    kind, address, models, *fails_at = sys.argv[1:]
    context: zmq.Context[Any] = zmq.Context()
    torch.multiprocessing.set_sharing_strategy("file_system")
    for _ in range(int(models)):
        model = Model(*fails_at or [""])
        try:
            {"plain": plain, "package": package}[kind](address, model, context)
            error = ""
        except Exception as raised:  # noqa: BLE001 - told to the test
            error = f"{type(raised).__name__}: {raised}"
        sys.stdout.write(json.dumps({"seen": model.seen, "hooked": model.hooked, "error": error}) + "\n")


main()
