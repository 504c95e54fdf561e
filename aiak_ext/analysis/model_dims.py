"""Model dimensions from a config file: what a sample costs, and how many parameters the model has."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from data_balance import CostModel, SampleCostModel
from data_balance.cost import NEXT_TO_NOTHING


@dataclass(frozen=True, kw_only=True)
class TransformerDims:
    """Sizes of one transformer; the names are those of Megatron and of `CostModel.for_transformer`.

    Raises:
        ValueError: a size is not a positive number.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    gated_linear_unit: bool = False
    vocab_size: int = 0
    full_attention_share: float = 1.0
    window_tokens: int = 0
    num_experts: int = 1
    num_experts_per_token: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden_size", "ffn_hidden_size", "num_layers", "num_experts", "num_experts_per_token"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, from which nothing can be computed; give the model's real size")

    @property
    def kv_share(self) -> float:
        """Key-value heads over query heads."""
        if self.num_query_groups and self.num_attention_heads:
            return self.num_query_groups / self.num_attention_heads
        return 1.0

    @property
    def query_size(self) -> int:
        """Width of the queries: heads x channels, the hidden size where these are not given."""
        if self.num_attention_heads and self.kv_channels:
            return self.num_attention_heads * self.kv_channels
        return self.hidden_size

    def num_parameters(self) -> int:
        """Weights of layers, embedding and output projection; biases and norms are left out."""
        attention = self.hidden_size * self.query_size * (2 + 2 * self.kv_share)
        mlp = self.hidden_size * self.ffn_hidden_size * (3 if self.gated_linear_unit else 2) * self.num_experts
        return int(self.num_layers * (attention + mlp) + 2 * self.vocab_size * self.hidden_size)

    def cost_model(self, *, causal: bool) -> CostModel:
        """Forward FLOPs of a sequence."""
        return CostModel.for_transformer(
            self.hidden_size,
            self.ffn_hidden_size,
            self.num_layers,
            self.full_attention_share,
            window_tokens=self.window_tokens,
            gated_linear_unit=self.gated_linear_unit,
            causal=causal,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            num_experts_per_token=self.num_experts_per_token,
            vocab_size=self.vocab_size,
        )


@dataclass(frozen=True, kw_only=True)
class ModelDims:
    """A vision-language model; `vision` is None for a text model."""

    language: TransformerDims
    vision: TransformerDims | None = None

    @classmethod
    def from_json(cls, path: str | Path) -> ModelDims:
        """Read ``{"image_encoder": {...}, "text_decoder": {...}}``, the file of ``--data-balance-model-config``.

        The encoder's sizes may lie in an inner ``vision_encoder``. What has no hidden size counts as absent.

        Raises:
            ValueError: the file is not such JSON or has no sizes of the text decoder.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"model config {path} cannot be read ({error}); give the path of a JSON file") from error
        decoder = _dims_of(content.get("text_decoder", {}))
        if decoder is None:
            raise ValueError(
                f"model config {path} has no text_decoder with hidden_size, ffn_hidden_size and num_layers, so no cost "
                "can be derived; add them"
            )
        encoder = content.get("image_encoder", {})
        return cls(language=decoder, vision=_dims_of({**encoder, **encoder.get("vision_encoder", {})}))

    def cost_model(self) -> SampleCostModel:
        """Forward FLOPs of a sample; the backward pass is twice that in every term, so ratios hold."""
        vision = CostModel(NEXT_TO_NOTHING, 0.0) if self.vision is None else self.vision.cost_model(causal=False)
        return SampleCostModel(vision=vision, language=self.language.cost_model(causal=True))

    def num_parameters(self) -> int:
        """Weights of both parts."""
        return self.language.num_parameters() + (0 if self.vision is None else self.vision.num_parameters())


#: The sizes of LLaVA-OneVision-1.5-4B, as `data_balance.options.DEFAULT_COST_MODEL`.
DEFAULT_DIMS = ModelDims(
    vision=TransformerDims(hidden_size=1024, ffn_hidden_size=4096, num_layers=24, num_attention_heads=16),
    language=TransformerDims(
        hidden_size=2560,
        ffn_hidden_size=9728,
        num_layers=36,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        gated_linear_unit=True,
        vocab_size=151936,
    ),
)


def _dims_of(sizes: dict[str, Any]) -> TransformerDims | None:
    if not all(name in sizes for name in ("hidden_size", "ffn_hidden_size", "num_layers")):
        return None
    known = {each.name for each in fields(TransformerDims)}
    return TransformerDims(**{name: value for name, value in sizes.items() if name in known})
