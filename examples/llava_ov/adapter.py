"""The adapter between ViT and language model: norm, 2x2 merge, two-layer MLP. Seed document 002, section 3.4."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu

from .config import VisionConfig
from .layers import LayerNorm


class Adapter(MegatronModule):
    """Maps features [patches, vision hidden] to visual tokens [patches / merge^2, language hidden].

    The merged patches of one token are consecutive rows (see `vision.patch_positions`), so merging is a reshape.
    """

    def __init__(self, config: TransformerConfig, vision: VisionConfig, output_size: int) -> None:
        super().__init__(config=config)
        self.merged_size = vision.hidden_size * vision.patches_per_token
        self.layernorm = LayerNorm(config, vision.hidden_size, eps=config.layernorm_epsilon)
        self.linear_fc1 = ColumnParallelLinear(
            self.merged_size, self.merged_size, config=config, init_method=config.init_method
        )
        self.linear_fc2 = RowParallelLinear(
            self.merged_size,
            output_size,
            config=config,
            init_method=config.init_method,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, features: Tensor) -> Tensor:
        merged = self.layernorm(features).reshape(-1, self.merged_size)
        hidden, _ = self.linear_fc1(merged)
        output, _ = self.linear_fc2(gelu(hidden))
        return output
