"""Work of a micro batch in floating-point operations, which the step efficiency compares over ranks."""

from __future__ import annotations

from data_balance import CostModel, SampleCostModel
from examples.llava_ov.config import LlavaOnevisionConfig
from examples.llava_ov.micro_batch import MicroBatch


class BatchCost:
    """Forward FLOPs of a micro batch as executed: padded tokens count.

    Attention is quadratic within a segment only: a row or a packed sample in the decoder, a frame in the ViT.
    """

    def __init__(self, config: LlavaOnevisionConfig) -> None:
        language, vision = config.language, config.vision
        self._language = CostModel.for_transformer(
            language.hidden_size,
            language.ffn_hidden_size,
            language.num_layers,
            gated_linear_unit=True,
            causal=True,
            num_attention_heads=language.num_attention_heads,
            num_query_groups=language.num_query_groups,
            vocab_size=language.padded_vocab_size,
        )
        self._vision = CostModel.for_transformer(vision.hidden_size, vision.ffn_hidden_size, vision.num_layers)

    @property
    def sample_cost_model(self) -> SampleCostModel:
        """The same costs as the data balance plans with."""
        return SampleCostModel(vision=self._vision, language=self._language)

    def __call__(self, batch: MicroBatch, vision_cost: float | None = None) -> float:
        """FLOPs of the batch; `vision_cost` takes the place of its own images' where others were encoded."""
        language_cost = self._language.cost_of_segments(batch.segment_lengths)
        if vision_cost is not None:
            return language_cost + vision_cost
        frames, height, width = batch.image_grid_thw.unbind(1)
        patches_per_frame = (height * width).repeat_interleave(frames)
        return language_cost + self._vision.cost_of_segments(patches_per_frame)
