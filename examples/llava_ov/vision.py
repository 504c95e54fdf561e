"""RICE-style vision transformer: native-resolution patches, 2D rotary positions, attention within one image.

A frame of a video is a segment of its own: t frames of h x w patches attend within the frame. Every segment starts
with the class token, which carries global features through the layers and is dropped at the end. Seed document 002,
section 3.2.
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .config import LlavaOnevisionConfig, VisionConfig
from .layers import LayerNorm, transformer_layer_spec


def vision_transformer_config(config: LlavaOnevisionConfig) -> TransformerConfig:
    """Megatron's configuration of the ViT. It is never split over pipeline stages, and runs without sequence
    parallelism: the number of patches need not divide by the tensor-parallel size."""
    vision, runtime = config.vision, config.runtime
    return TransformerConfig(
        num_layers=vision.num_layers,
        hidden_size=vision.hidden_size,
        ffn_hidden_size=vision.ffn_hidden_size,
        num_attention_heads=vision.num_attention_heads,
        kv_channels=vision.kv_channels,
        normalization="LayerNorm",
        layernorm_epsilon=vision.layernorm_epsilon,
        activation_func=torch.nn.functional.gelu,
        add_bias_linear=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=runtime.tensor_model_parallel_size,
        params_dtype=runtime.params_dtype,
        bf16=runtime.params_dtype == torch.bfloat16,
        use_cpu_initialization=True,
        recompute_granularity=runtime.recompute_granularity,
        recompute_method=runtime.recompute_method,
        recompute_num_layers=runtime.recompute_num_layers,
    )


def check_grids(grids: list[list[int]], num_patches: int, merge: int) -> None:
    """Check (t, h, w) grids against the patches at hand.

    Raises:
        ValueError: an empty or unmergeable grid, or grids and patches that do not belong together.
    """
    for t, h, w in grids:
        if t < 1 or h < 1 or w < 1 or h % merge or w % merge:
            raise ValueError(
                f"image grid (t, h, w) = ({t}, {h}, {w}) cannot be merged into squares of {merge} x {merge} patches; "
                f"resize images so that height and width are multiples of {merge} patches"
            )
    expected = sum(t * h * w for t, h, w in grids)
    if expected != num_patches:
        raise ValueError(
            f"image_grid_thw describes {expected} patches but pixel_values holds {num_patches}: images would be cut "
            "in the wrong places; pass the grids of exactly these images"
        )


def patch_positions(h: int, w: int, merge: int) -> Tensor:
    """(row, column) of each patch of one frame, int64 [h*w, 2].

    Patches come square by square: the merge*merge patches that become one visual token are neighbours.
    """
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    positions = torch.stack([rows, columns], dim=-1)
    return positions.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2).reshape(-1, 2)


def with_class_rows(rows: Tensor, class_row: Tensor, frame_lengths: list[int]) -> Tensor:
    """Put `class_row` [1, d] before each frame of `rows` [patches, d]."""
    return torch.cat([part for frame in rows.split(frame_lengths) for part in (class_row, frame)])


class RiceViT(MegatronModule):
    """Maps pixel_values [patches, patch_dim] and grid_thw [images, 3] to features [patches, hidden_size].

    An image's features depend on that image alone. Rows come back in the order in which they went in.
    """

    def __init__(self, config: TransformerConfig, vision: VisionConfig) -> None:
        super().__init__(config=config)
        self.spatial_merge_size = vision.spatial_merge_size
        dtype = config.params_dtype
        self.patch_embed = torch.nn.Linear(vision.patch_dim, vision.hidden_size, bias=False, dtype=dtype)
        self.class_embedding = torch.nn.Parameter(torch.empty(vision.hidden_size, dtype=dtype))
        # The class token has no place in the grid: its rotary angles are learned.
        self.class_pos_emb = torch.nn.Parameter(torch.empty(1, vision.kv_channels // 2, dtype=dtype))
        torch.nn.init.normal_(self.class_embedding, std=config.init_method_std)
        torch.nn.init.normal_(self.class_pos_emb, std=config.init_method_std)
        self.pre_layernorm = LayerNorm(config, vision.hidden_size, eps=vision.pre_layernorm_epsilon)
        layer = transformer_layer_spec(LayerNorm, AttnMaskType.no_mask)
        # No norm after the last layer: the adapter begins with one.
        self.decoder = TransformerBlock(
            config, TransformerBlockSubmodules(layer_specs=[layer] * vision.num_layers), post_layer_norm=False
        )
        # Not a buffer: a module cast to bf16 would round the positions.
        exponents = torch.arange(0, vision.kv_channels // 2, 2, dtype=torch.float32) / (vision.kv_channels // 2)
        self.inv_freq = vision.rotary_base**-exponents

    def rotary_angles(self, grids: list[list[int]]) -> Tensor:
        """Angles of all patches, float32 [patches, kv_channels/2]: first half for the row, second for the column.

        On the CPU, like the grids that they are made from.
        """
        merge = self.spatial_merge_size
        positions = torch.cat([patch_positions(h, w, merge).repeat(t, 1) for t, h, w in grids])
        return (positions[..., None] * self.inv_freq).flatten(1)

    def forward(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """Encode one or more images; see the class.

        Raises:
            ValueError: grids that do not fit the patches, see `check_grids`.
        """
        grids = grid_thw.tolist()
        check_grids(grids, pixel_values.shape[0], self.spatial_merge_size)
        frame_lengths = [h * w for t, h, w in grids for _ in range(t)]

        patches = self.patch_embed(pixel_values.to(self.patch_embed.weight.dtype))
        hidden = self.pre_layernorm(with_class_rows(patches, self.class_embedding[None], frame_lengths))
        # Each tensor-parallel rank turns its own heads by these angles: the learned one's gradient is their sum.
        class_angles = copy_to_tensor_model_parallel_region(self.class_pos_emb)
        angles = with_class_rows(self.rotary_angles(grids).to(hidden.device), class_angles, frame_lengths)

        # On the CPU on purpose: every layer reads the boundaries as Python numbers.
        segment_lengths = [length + 1 for length in frame_lengths]
        cu_seqlens = torch.tensor([0, *segment_lengths], device="cpu").cumsum(0, dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(segment_lengths),
            max_seqlen_kv=max(segment_lengths),
        )
        hidden = self.decoder(
            hidden_states=hidden[:, None],
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], dim=-1)[:, None, None],
            packed_seq_params=packed,
        )
        return torch.cat([segment[1:] for segment in hidden[:, 0].split(segment_lengths)])
