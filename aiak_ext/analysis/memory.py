"""Memory of a training step on one device, from model dimensions: weights and optimizer, and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from aiak_ext.analysis.model_dims import ModelDims, TransformerDims

RECOMPUTE = ("none", "full")
#: Share of the device's memory that may be planned with: the rest goes to fragmentation, buffers and the context.
USABLE_SHARE = 0.9
_BF16 = 2
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """What a step keeps on a device that trains in bf16 with fp32 gradients and Adam.

    Activations are counted as what the backward pass needs of a layer with a fused attention kernel, without
    dropout (accounting as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    section 4). Tensor parallelism is taken with sequence parallelism, so it divides all of it. Pipeline
    parallelism does not change the first stage's activations: it holds as many micro batches as there are stages, of
    a layer share each.

    Raises:
        ValueError: a parallel size is not positive or the recomputation unknown.
    """

    dims: ModelDims
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    recompute: str = "none"
    distributed_optimizer: bool = True
    """Whether the optimizer's 12 bytes per weight are spread over the data-parallel ranks."""

    def __post_init__(self) -> None:
        for name in ("data_parallel", "tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a positive number of ranks")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute {self.recompute!r} is unknown; choose one of {', '.join(RECOMPUTE)}")

    def state_bytes(self) -> float:
        """Bytes of weights, gradients, master weights and both Adam moments on one device."""
        per_weight = _BF16 + _FP32 + 12 / (self.data_parallel if self.distributed_optimizer else 1)
        return self.dims.num_parameters() / (self.tensor_parallel * self.pipeline_parallel) * per_weight

    def activation_bytes(self, num_tokens: ArrayLike, num_patches: ArrayLike) -> Any:
        """Bytes of activations of micro batches with these tokens (padding included) and patches."""
        tokens, patches = np.asarray(num_tokens, dtype=np.float64), np.asarray(num_patches, dtype=np.float64)
        language = self.dims.language
        total = tokens * (self._bytes_per_token(language) + language.vocab_size * (_BF16 + _FP32))
        if self.dims.vision is not None:
            total = total + patches * self._bytes_per_token(self.dims.vision)
        return total / self.tensor_parallel

    def step_bytes(self, num_tokens: ArrayLike, num_patches: ArrayLike) -> Any:
        """Bytes of state and activations together."""
        return self.state_bytes() + self.activation_bytes(num_tokens, num_patches)

    def largest_token_budget(self, device_bytes: float, patches_per_token: float = 0.0) -> int:
        """Most tokens of a micro batch that fit the device; 0 when not even the state does.

        Args:
            device_bytes: Memory of the device.
            patches_per_token: Vision patches that come with every token, on average.
        """
        room = USABLE_SHARE * device_bytes - self.state_bytes()
        return max(int(room / self.activation_bytes(1, patches_per_token)), 0)

    def fits(self, step_bytes: float, device_bytes: float) -> bool:
        """Whether so many bytes leave the device its reserve."""
        return step_bytes <= USABLE_SHARE * device_bytes

    def _bytes_per_token(self, dims: TransformerDims) -> float:
        layer_input = _BF16 * dims.hidden_size
        if self.recompute == "full":
            return dims.num_layers * layer_input + _layer_bytes(dims)
        return dims.num_layers * _layer_bytes(dims)


def _layer_bytes(dims: TransformerDims) -> float:
    """Bytes per token that the backward pass of one layer needs."""
    # Inputs of both norms and their outputs; query, attention output; key and value; softmax statistics.
    attention = _BF16 * (4 * dims.hidden_size + 2 * dims.query_size + 2 * dims.query_size * dims.kv_share)
    statistics = _FP32 * (dims.num_attention_heads or 1)
    # Before and after the activation function; a gated unit keeps gate, value and product.
    mlp = _BF16 * dims.ffn_hidden_size * (3 if dims.gated_linear_unit else 2) * dims.num_experts_per_token
    return attention + statistics + mlp
