"""Megatron-core without CUDA: torch's CUDA entry points answer for the CPU.

Invariant: nothing is changed where CUDA is available; `install()` acts once and before megatron is imported. Megatron
names "cuda" literally in many places (factories, `.cuda()`, streams, generator state); each redirection below says
which of them it serves.
"""

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors

_FACTORIES = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "rand", "randn", "randint",
    "empty_like", "zeros_like", "ones_like", "full_like",
)  # fmt: skip

_installed = False


def install() -> None:
    """Redirect CUDA calls to the CPU, unless CUDA is available or this was done before."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _stub_triton_module()
    _redirect_factories()
    _redirect_tensor_methods()
    _redirect_device_queries()
    _redirect_streams()
    _redirect_generators()
    _redirect_barrier()
    with _uncompiled():
        _patch_megatron()


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _stub_triton_module() -> None:
    """megatron-core 0.19 imports triton unconditionally in one module of its MoE path; none of it is called here."""
    if importlib.util.find_spec("triton") is not None:
        return
    module = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")

    def __getattr__(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError(f"{name} is a triton kernel and triton is not installed; expected moe_paged_stash off")

        return missing

    module.__dict__["__getattr__"] = __getattr__
    sys.modules[module.__name__] = module


def _redirect_factories() -> None:
    """`torch.zeros(..., device="cuda", pin_memory=True)` and its kin."""

    def redirected(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def factory(*args: Any, **kwargs: Any) -> Any:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return original(*args, **kwargs)

        return factory

    _device_constructors()  # caches the originals: `with torch.device("meta")` recognises factories by identity
    for name in _FACTORIES:
        setattr(torch, name, redirected(getattr(torch, name)))


def _redirect_tensor_methods() -> None:
    """`.cuda()`, `.to("cuda")`, `.pin_memory()`, and `.type()` where megatron's optimizer compares CUDA names."""
    to, type_of = Tensor.to, Tensor.type

    def redirected_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and _names_cuda(args[0]):
            args = ("cpu", *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *args, **kwargs)

    def redirected_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        if isinstance(answer, str) and "/megatron/core/optimizer/" in sys._getframe(1).f_code.co_filename:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    def unchanged(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self

    _replace(Tensor, to=redirected_to, type=redirected_type, cuda=unchanged, pin_memory=unchanged)
    _replace(Tensor, record_stream=lambda self, stream: None)
    _replace(torch.nn.Module, cuda=unchanged)


def _redirect_device_queries() -> None:
    _replace(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        set_device=lambda device: None,
        get_device_capability=lambda *args: (0, 0),
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda *args: None,
        memory_allocated=lambda *args: 0,
        max_memory_allocated=lambda *args: 0,
        memory_reserved=lambda *args: 0,
        max_memory_reserved=lambda *args: 0,
    )


class _Event:
    """A point on a stream that has always been reached."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record(self, *_args: Any) -> None: ...

    def wait(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: "_Event") -> float:
        return 0.0


class _Stream(contextlib.nullcontext[None]):
    """The one queue there is: everything on it has finished."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()

    def wait_stream(self, *_args: Any) -> None: ...

    def wait_event(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


def _redirect_streams() -> None:
    stream = _Stream()
    _replace(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        stream=lambda chosen: contextlib.nullcontext(),
        synchronize=lambda *args: None,
    )
    _replace(torch.cuda.nvtx, range_push=lambda *args: None, range_pop=lambda *args: None)


def _cpu_generator_state(*_args: Any, **_kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_cpu_generator_state(state: Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(state)


def _redirect_generators() -> None:
    """Megatron's tracker forks the CUDA generator; without CUDA it forks the CPU's."""
    _replace(
        torch.cuda,
        manual_seed=torch.manual_seed,
        get_rng_state=_cpu_generator_state,
        set_rng_state=_set_cpu_generator_state,
    )


def _redirect_barrier() -> None:
    """`device_ids` of a barrier is NCCL's."""
    barrier = dist.barrier

    def redirected(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    _replace(dist, barrier=redirected)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Megatron decorates small functions with torch.compile at import: on the CPU that loads TorchInductor at every start
    of a rank (1 s), and calls for a C++ compiler at the first use. Here they stay the functions that they are.
    """

    def unchanged(function: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
        return (lambda later: later) if function is None else function

    compiled = torch.compile
    _replace(torch, compile=unchanged)
    try:
        yield
    finally:
        _replace(torch, compile=compiled)


def _patch_megatron() -> None:
    """Megatron's own functions that reach past the entry points above."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    _replace(random, _get_cuda_rng_state=_cpu_generator_state, _set_cuda_rng_state=_set_cpu_generator_state)
    to_host = token_dispatcher.maybe_move_tensor_to_cpu

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, Tensor):
            return tensor.numpy()
        return to_host(tensor, as_numpy=as_numpy, record_stream=False)

    _replace(token_dispatcher, maybe_move_tensor_to_cpu=on_host)


def _replace(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)
