"""What the vision and the language transformer share: norms that allow sequence parallelism, and the layer spec."""

from __future__ import annotations

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from .attention import SegmentedAttention


def _mark_sequence_parallel(norm: torch.nn.Module, config: TransformerConfig) -> None:
    # Under sequence parallelism each tensor-parallel rank norms its own part of the sequence; Megatron sums the
    # gradients of parameters that carry this mark. Its own WrappedTorchNorm refuses sequence parallelism instead.
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with the constructor that Megatron layer specs call."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark_sequence_parallel(self, config)


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm with the constructor that Megatron layer specs call."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark_sequence_parallel(self, config)


def transformer_layer_spec(norm: type, attn_mask_type: AttnMaskType, qk_layernorm: bool = False) -> ModuleSpec:
    """A pre-norm transformer layer of Megatron's tensor-parallel parts around `SegmentedAttention`."""
    qk_norm = norm if qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": attn_mask_type},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=SegmentedAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
