"""Megatron-core as the trainer uses it: with and without CUDA, from and to Hugging Face folders.

Invariant: `cpu.install()` runs before anything of megatron is imported; no other package imports megatron.
"""

import logging
import warnings

# Both packages are pinned and say the same at every start: Transformer Engine and apex are missing (the local spec
# needs neither), GPTModel will be superseded, layouts are computed by DDP itself. Errors still pass.
warnings.filterwarnings("ignore", module=r"(megatron|mbridge)\.")
warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+. is deprecated", category=FutureWarning)
for _name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel", "distributed.fsdp"):
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)

from physarum.actors.trainer.megatron import cpu  # noqa: E402

cpu.install()
