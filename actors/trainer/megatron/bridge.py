"""Between a Hugging Face folder and Megatron's local-spec model, by mbridge's tables.

Invariant: exporting what was loaded gives the same bytes under the same names. mbridge expects Transformer Engine's
names; only the translation of names and the choice of layers are ours, nothing of mbridge is patched.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mbridge.core.llm_bridge import LLMBridge
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from physarum.actors.trainer.errors import UnsupportedModel
from physarum.actors.trainer.megatron.local_spec import block_spec
from physarum.weightsync.quantisation.plan import Quantisation
from physarum.weightsync.quantisation.reading import Dequantised

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")


class LocalSpecBridge(LLMBridge):
    """The parts of an mbridge bridge that depend on the layer spec; mixed into the architecture's own bridge."""

    NORM_NAMES: Mapping[str, str] = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    """Parts of a layer's names that mbridge's tables know otherwise: as norms fused with what follows them."""

    @classmethod
    def check(cls, hf_config: PretrainedConfig) -> None:
        """Raises UnsupportedModel for what this architecture can have and would be computed wrongly here."""
        rotary_arguments(hf_config)

    def __init__(self, hf_config: PretrainedConfig, settings: Mapping[str, Any], **kwargs: Any) -> None:
        self._settings = dict(settings)
        self._DIRECT_MAPPING: dict[str, str] = dict(
            type(self)._DIRECT_MAPPING
        )  # mbridge writes tied names into the class's table
        super().__init__(hf_config, **kwargs)

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> TransformerConfig:
        return super()._build_base_config(text_config_key, **{**kwargs, **self._settings})

    def _model_provider(self, post_model_creation_callbacks: list[Callable[[torch.nn.Module], None]]) -> Any:
        """The one that pads the vocabulary; some architectures of mbridge bring their own, with draft layers."""
        return LLMBridge._model_provider(self, post_model_creation_callbacks)

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        return SafeTensorIO(self._get_actual_hf_path(weights_path))

    def _adjust_mapping_for_shared_weights(self) -> None:
        """The output layer that the last of several stages holds beside the first stage's embeddings."""
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = self._DIRECT_MAPPING["embedding.word_embeddings.weight"]

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        self.has_vp_stage = True
        return block_spec(self.config, vp_stage)

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            **rotary_arguments(self.hf_config),
        }

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        """Names of our modules -> the names that mbridge's tables know (Transformer Engine's, fused norms).

        Layers and experts are counted over the whole model, not from this rank's first.
        """
        layers = [_Layer(layer.layer_number - 1, "linear_fc1" in layer.mlp._modules) for layer in model.decoder.layers]
        first_expert = self.mpu.ep_rank * ((self.config.num_moe_experts or 0) // self.mpu.ep_size)
        names = (name for name in model.state_dict() if "_extra_state" not in name)
        return {name: _table_name(name, layers, first_expert, self.NORM_NAMES) for name in names}


class _Layer(NamedTuple):
    index: int
    """In the whole model."""
    is_dense: bool


def _table_name(name: str, layers: list[_Layer], first_expert: int, norms: Mapping[str, str]) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer, rest = layers[int(match.group(1))], match.group(2)
    for own, known in norms.items():
        rest = rest.replace(own, known)
    if layer.is_dense:
        rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    rest = _EXPERT.sub(lambda found: f"mlp.experts.{found[2]}.{found[3]}{int(found[1]) + first_expert}", rest)
    return f"decoder.layers.{layer.index}.{rest}"


def rotary_arguments(hf_config: PretrainedConfig) -> dict[str, Any]:
    """GPTModel's rotary arguments from `rope_parameters`. Raises UnsupportedModel for a scaling Megatron lacks."""
    rope = dict(hf_config.rope_parameters)
    kind = rope.get("rope_type", "default")
    arguments: dict[str, Any] = {
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }
    if kind == "linear":
        return {**arguments, "seq_len_interpolation_factor": rope["factor"]}
    if kind == "llama3":
        fixed = (rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"])
        if fixed != (1.0, 4.0, 8192):
            raise UnsupportedModel(f"llama3 rope scaling with {fixed}; Megatron-core has (1.0, 4.0, 8192) built in")
        return {**arguments, "rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    if kind != "default":
        raise UnsupportedModel(f"rope scaling {kind!r} has no counterpart here; expected default, linear or llama3")
    return arguments


def load_hf(bridge: LocalSpecBridge, model: torch.nn.Module, folder: Path) -> None:
    """Fill `model` from the folder's safetensors; every rank reads what it holds a part of. What is quantised there is trained
    as it was stored, in the model's own type. Raises UnsupportedModel."""
    table_names = bridge._weight_name_mapping_mcore_local_to_global(model)
    try:
        files = bridge._get_safetensor_io(str(folder))
        names_stored = frozenset(files.load_hf_weight_names())
        stored = Dequantised(Quantisation.in_folder(folder), names_stored, files.load_one_hf_weight)
        with torch.no_grad():
            for name, own in model.state_dict().items():
                if name in table_names:
                    names = bridge._weight_name_mapping_mcore_to_hf(table_names[name])
                    found = [stored.weight(one) for one in names]
                    own.copy_(_part(bridge, table_names[name], found, own))
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"model folder {folder}: weights are missing or unreadable ({error})") from error


def _part(bridge: LocalSpecBridge, table_name: str, found: list[Tensor], own: Tensor) -> Tensor:
    """This rank's part of a parameter; `found` are the Hugging Face tensors that it is made of."""
    whole = bridge._weight_to_mcore_format(table_name, found)
    if ".mlp.experts." in table_name:
        return bridge._weight_split_across_tp(table_name, whole, own, bridge.mpu.etp_size)[bridge.mpu.etp_rank]
    return bridge._weight_split_across_tp(table_name, whole, own, bridge.mpu.tp_size)[bridge.mpu.tp_rank]
