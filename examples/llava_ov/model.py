"""LLaVA-OneVision: vision transformer, adapter and language model under Megatron's pipeline conventions.

Seed document 002, section 3.1. The first pipeline stage holds the encoder (ViT and adapter) and the first decoder
layers; later stages hold decoder layers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from .adapter import Adapter
from .config import MODEL_FAMILY, PARTS, LlavaOnevisionConfig
from .initialize import initialize_weights
from .language import build_language_model, language_transformer_config
from .registry import register_model_provider
from .vision import RiceViT, vision_transformer_config

IGNORE_INDEX = -100

Encoder = Callable[[Tensor, Tensor], Tensor]


class LlavaOnevision(MegatronModule):
    """The model, or the part of it that one pipeline stage holds; build it with `build_model`."""

    def __init__(
        self,
        model_config: LlavaOnevisionConfig,
        pre_process: bool,
        post_process: bool,
        add_encoder: bool,
        add_decoder: bool,
        vp_stage: int | None,
    ) -> None:
        config = language_transformer_config(model_config)
        super().__init__(config=config)
        self.model_config = model_config
        self.pre_process = pre_process
        self.post_process = post_process
        self.add_encoder = add_encoder
        self.add_decoder = add_decoder
        self.vp_stage = vp_stage
        # Read by Megatron's schedules, DDP wrapper and gradient finalisation.
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = model_config.language.tie_word_embeddings
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()

        if add_encoder:
            vision_config = vision_transformer_config(model_config)
            self.vision_model = RiceViT(vision_config, model_config.vision)
            self.adapter = Adapter(vision_config, model_config.vision, config.hidden_size)
            self.set_encoder(self.encode_images)
        if add_decoder:
            self.language_model = build_language_model(model_config, config, pre_process, post_process, vp_stage)

    def set_encoder(self, encoder: Encoder) -> None:
        """Replace the vision forward by `encoder`, e.g. a load-balancing wrapper around `encode_images`.

        `encoder` maps (pixel_values [patches, patch_dim], grid_thw [images, 3]) to visual tokens [patches / 4,
        hidden_size]. It is called on text-only batches too, with no rows.
        """
        # Past torch's attribute hook: a wrapper that is a module would register the ViT's parameters twice.
        object.__setattr__(self, "encoder", encoder)

    def encode_images(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """Visual tokens of all images, [patches / 4, hidden_size], in order; no images give [0, hidden_size].

        Without images one minimal image is encoded and cut away: every rank runs the same backward, so that the
        gradients of the vision parameters exist and no collective waits for a text-only rank.
        """
        if grid_thw.shape[0]:
            return self.adapter(self.vision_model(pixel_values, grid_thw))
        merge = self.model_config.vision.spatial_merge_size
        weight = self.vision_model.patch_embed.weight
        dummy = torch.zeros(merge * merge, weight.shape[1], dtype=weight.dtype, device=weight.device)
        return self.adapter(self.vision_model(dummy, torch.tensor([[1, merge, merge]])))[:0]

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Take the hidden states of the previous pipeline stage (called by Megatron's schedules)."""
        if self.add_decoder:
            self.language_model.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The word embedding that first and last stage share (called by Megatron's gradient finalisation)."""
        return self.language_model.shared_embedding_or_output_weight() if self.add_decoder else None

    def forward(
        self,
        images: Tensor | None,
        image_grid_thw: Tensor | None,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Losses, logits or hidden states of a batch.

        Args:
            images: Patches of all images of the batch, sample by sample, [patches, patch_dim]; None or no rows for
                a text-only batch. Needed on the first stage only.
            image_grid_thw: (t, h, w) in patches, int64 [images, 3].
            input_ids: int64 [b, s], right-padded; ``t*h*w/4`` image tokens per image. Needed on the first stage only.
            position_ids: Unused: rotary positions count from the start of each sequence or packed segment.
            attention_mask: Must be None: attention is causal, padding is on the right, packing has its own argument.
            labels: int64 [b, s], the token to predict at each position, -100 for none. Needed on the last stage only.
            packed_seq_params: Segments of a packed batch (b = 1), on every stage; see `packed_segments`.

        Returns:
            Last stage: with labels the loss of every position [b, s], zero where the label is -100; without labels
            the logits [b, s, vocabulary / TP]. Other stages: hidden states [s, b, hidden_size]. Encoder only: visual
            tokens [patches / 4, hidden_size].

        Raises:
            ValueError: image tokens and visual tokens differ in number, a mask is given, or the sequence cannot be
                split for sequence parallelism.
        """
        if attention_mask is not None:
            raise ValueError(
                "attention_mask is given, but this model's attention is causal within sequences and segments and "
                "would ignore it; pad on the right and pass None"
            )
        visual_tokens = self._encode(images, image_grid_thw) if self.add_encoder else None
        if not self.add_decoder:
            assert visual_tokens is not None
            return visual_tokens
        output = self.language_model(
            input_ids=None,
            position_ids=None,
            attention_mask=None,
            decoder_input=self._embed(input_ids, visual_tokens) if self.pre_process else None,
            labels=None if labels is None else labels.clamp(min=0),
            packed_seq_params=packed_seq_params,
        )
        if self.post_process and labels is not None:
            return output.masked_fill(labels == IGNORE_INDEX, 0.0)
        return output

    def _encode(self, images: Tensor | None, image_grid_thw: Tensor | None) -> Tensor:
        if images is None or image_grid_thw is None:
            weight = self.vision_model.patch_embed.weight
            images = torch.zeros(0, weight.shape[1], dtype=weight.dtype, device=weight.device)
            image_grid_thw = torch.zeros(0, 3, dtype=torch.int64, device=weight.device)
        return self.encoder(images, image_grid_thw)

    def _embed(self, input_ids: Tensor | None, visual_tokens: Tensor | None) -> Tensor:
        """Word embeddings [s, b, h] with the visual tokens in the image tokens' places."""
        assert input_ids is not None, "the first pipeline stage needs input_ids"
        embeddings = self.language_model.embedding(input_ids=input_ids, position_ids=None)
        sample, position = (input_ids == self.model_config.image_token_id).nonzero(as_tuple=True)
        num_visual_tokens = 0 if visual_tokens is None else visual_tokens.shape[0]
        if sample.numel() != num_visual_tokens:
            raise ValueError(
                f"the batch has {sample.numel()} image tokens (id {self.model_config.image_token_id}) but "
                f"{num_visual_tokens} visual tokens: features would end up beside the wrong text; every image of "
                "t x h x w patches needs t*h*w/4 image tokens"
            )
        if visual_tokens is not None:
            # Also with no rows: it keeps the vision tower in the graph of a text-only batch.
            embeddings = embeddings.index_put((position, sample), visual_tokens.to(embeddings.dtype))
        if self.config.sequence_parallel:
            tp_size = self.config.tensor_model_parallel_size
            if embeddings.shape[0] % tp_size:
                raise ValueError(
                    f"sequence length {embeddings.shape[0]} does not divide by the tensor-parallel size {tp_size}, "
                    "so sequence parallelism cannot split it; pad batches to a multiple of it"
                )
            embeddings = scatter_to_sequence_parallel_region(embeddings, group=self.pg_collection.tp)
        return embeddings


@register_model_provider(MODEL_FAMILY)
def build_model(
    config: LlavaOnevisionConfig,
    pre_process: bool = True,
    post_process: bool = True,
    add_encoder: bool = True,
    add_decoder: bool = True,
    vp_stage: int | None = None,
) -> LlavaOnevision:
    """The model, or one pipeline stage of it, with weights that depend on `config.runtime.seed` alone.

    Needs Megatron's parallel state (`initialize_model_parallel`) with the layout of `config.runtime`. The model is
    built on the CPU; move it with ``.cuda()``.

    Args:
        config: Model and runtime.
        pre_process: This stage is the first: it holds the word embeddings and, with `add_encoder`, the encoder.
        post_process: This stage is the last: it holds the output layer.
        add_encoder: Build ViT and adapter (on the first stage; on others it has no effect).
        add_decoder: Build the language model; without it, forward returns visual tokens.
        vp_stage: Index of this model chunk under virtual pipelining.
    """
    model = LlavaOnevision(config, pre_process, post_process, add_encoder and pre_process, add_decoder, vp_stage)
    initialize_weights(model, config.runtime.seed)
    return model


def packed_segments(cu_lengths: Tensor | None, num_tokens: int) -> PackedSeqParams | None:
    """Attention segments of a packed batch for `LlavaOnevision.forward`; None when the batch is not packed.

    Args:
        cu_lengths: int32 [segments+1], from 0 to the number of true tokens, or None.
        num_tokens: Length of the (possibly padded) sequence; padding becomes a segment of its own.
    """
    if cu_lengths is None:
        return None
    bounds = cu_lengths.cpu().to(torch.int32)
    if bounds[-1] < num_tokens:
        bounds = torch.cat([bounds, torch.tensor([num_tokens], dtype=torch.int32)])
    longest = int(bounds.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def set_trainable_modules(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Freeze everything but the named parts: ``all``, ``vision_model``, ``adapter``, ``language_model``.

    Call it before the DDP wrapper is made, which allots gradient buffers to trainable parameters only. Parts that
    this pipeline stage does not hold are passed over.

    Raises:
        ValueError: no name, or an unknown one.
    """
    unknown = sorted(set(names) - {"all", *PARTS})
    if unknown or not names:
        raise ValueError(
            f"trainable modules {list(names)} {'are unknown: ' + ', '.join(unknown) if unknown else 'name nothing'}; "
            f"choose from all, {', '.join(PARTS)}"
        )
    for part in PARTS:
        if hasattr(model, part):
            getattr(model, part).requires_grad_("all" in names or part in names)
