"""CPU stand-in for `sgl_kernel`, of which only CUDA builds are published.

Invariant: it holds exactly the names that SGLang imports unconditionally in CPU mode. One of them is used when serving
and is implemented in torch; the others belong to speculative decoding, which this stand-in refuses by name. Every other
name is absent on purpose, so that SGLang's own fallbacks to PyTorch are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+cpu.standin"


class SpeculativeDecodingUnavailableError(RuntimeError):
    """A kernel of speculative decoding was called on a machine that has none."""


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Row `req_pool_indices[i]` of `req_to_token` takes the next end - start cache slots at columns start..end.

    Shapes: indices and offsets [requests]; req_to_token [rows, pool_len]; out_cache_loc [sum(end - start)].
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def _absent(kernel: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise SpeculativeDecodingUnavailableError(
            f"{kernel} was called, but the CPU stand-in of sgl_kernel has no speculative decoding;"
            " remove the speculative-* arguments or run on a machine with CUDA"
        )

    return refuse


assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
