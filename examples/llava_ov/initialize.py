"""Weights that depend on the seed and the parameter's name, not on the parallel layout.

Megatron draws weights in the order in which a rank builds its layers, so a pipeline stage starts from other weights
than the same layers of a one-rank model, and runs of different layouts cannot be compared.
"""

from __future__ import annotations

import math
import zlib

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from .layers import LayerNorm, RMSNorm


def canonical_names(model: torch.nn.Module) -> dict[str, str]:
    """Parameter names of this stage -> names in the one-rank model (layers numbered over the whole model)."""
    layers = {
        f"{name}.": f"{name.rpartition('.')[0]}.{module.layer_number - 1}."
        for name, module in model.named_modules()
        if isinstance(module, TransformerLayer)
    }
    names = {}
    for name, _ in model.named_parameters():
        prefix = next((prefix for prefix in layers if name.startswith(prefix)), "")
        names[name] = layers.get(prefix, "") + name[len(prefix) :]
    return names


def _is_sharded(parameter: Tensor) -> bool:
    return getattr(parameter, "tensor_model_parallel", False)


def full_shape(parameter: Tensor) -> list[int]:
    """Shape of `parameter` in a model without tensor parallelism."""
    shape = list(parameter.shape)
    if _is_sharded(parameter):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()  # type: ignore[attr-defined]
    return shape


def shard_of(full: Tensor, parameter: Tensor) -> Tensor:
    """This tensor-parallel rank's part of `full`, cut the way Megatron cuts `parameter`."""
    if not _is_sharded(parameter):
        return full
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    dim, stride = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
    # A stride of 2 is SwiGLU: gate and up projection lie one after the other, and each is cut by itself.
    return torch.cat(full.chunk(size * stride, dim)[rank::size], dim)


def initialize_weights(model: MegatronModule, seed: int) -> None:
    """Draw all weight matrices anew, each from a generator of its own.

    Normal with Megatron's `init_method_std`, and that over sqrt(2 * layers) for the projections back into the
    residual stream. Norms and biases keep their ones and zeros. Nothing is done on the meta device.
    """
    names = canonical_names(model)
    for module_name, module in model.named_modules():
        if isinstance(module, (LayerNorm, RMSNorm)):
            continue
        for local_name, parameter in module.named_parameters(recurse=False):
            if local_name == "bias" or parameter.is_meta:
                continue
            name = names[f"{module_name}.{local_name}" if module_name else local_name]
            _draw(parameter, name, seed, _std(model, name))


def _std(model: MegatronModule, name: str) -> float:
    std = model.config.init_method_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")) and ".layers." in name:
        part = model.vision_model if name.startswith("vision_model.") else model.language_model
        std /= math.sqrt(2 * part.config.num_layers)
    return std


@torch.no_grad()
def _draw(parameter: Tensor, name: str, seed: int, std: float) -> None:
    if name == "language_model.output_layer.weight" and getattr(parameter, "shared_embedding", False):
        name = "language_model.embedding.word_embeddings.weight"  # tied: the last stage's copy of the first's
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    full = torch.normal(0.0, std, full_shape(parameter), generator=generator, device=parameter.device)
    parameter.copy_(shard_of(full, parameter))
