"""GLM-4.5 and its like (arXiv 2508.06471): mbridge's names, with the configuration that transformers reads.

mbridge's configuration has the biases of queries and keys always on, one shared expert, an auxiliary loss, and no groups.
"""

from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.glm4moe import GLM4MoEBridge
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from physarum.actors.trainer.megatron.bridge import LocalSpecBridge
from physarum.actors.trainer.megatron.sigmoid_routing import check_router, router_fields


class Glm4MoeBridge(LocalSpecBridge, GLM4MoEBridge):
    """`glm4_moe`."""

    @classmethod
    def check(cls, hf_config: PretrainedConfig) -> None:
        super().check(hf_config)
        check_router(hf_config)

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        """mbridge's own forgets tied embeddings."""
        return LLMBridge._weight_name_mapping_mcore_to_hf(self, mcore_weights_name)

    def _build_config(self) -> TransformerConfig:
        return self._build_base_config(
            add_qkv_bias=self.hf_config.attention_bias,
            qk_layernorm=self.hf_config.use_qk_norm,
            **router_fields(self.hf_config),
        )
