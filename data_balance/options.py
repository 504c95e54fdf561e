"""Settings of the data balance beside the seed's arguments, and the image encoder's sizes from a model config file."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_balance.cost import NEXT_TO_NOTHING, CostModel, SampleCostModel
from data_balance.planners import DEFAULT_TOLERANCE

logger = logging.getLogger(__name__)

#: Used when neither a cost model nor a model config says otherwise: a ViT-L with 24 layers of 1,024 and a language
#: model with 36 layers of 2,560 (the sizes of LLaVA-OneVision-1.5-4B).
DEFAULT_COST_MODEL = SampleCostModel(
    vision=CostModel.for_transformer(1024, 4096, 24),
    language=CostModel.for_transformer(
        2560,
        9728,
        36,
        gated_linear_unit=True,
        causal=True,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=151936,
    ),
)
#: The seed's default algorithm weighs by squared length.
SQUARED_LENGTH = SampleCostModel(vision=CostModel(0.0, 1.0), language=CostModel(0.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class BalanceOptions:
    """How a step is balanced.

    Attributes:
        calculate_per_token_loss: Megatron's setting. Moving samples between ranks is exact only with it: False is
            refused; None leaves it to the caller.
        threshold: share of the heaviest rank's load that a move has to save, else nothing moves.
        tolerance: how far above the bound `min_move` leaves a rank.
        balance_every_slot: balance each micro batch, not the step's totals: for pipeline or expert parallelism and
            FSDP, where ranks meet at every micro batch.
        max_tokens: tokens that one micro batch may hold.
        max_patches: patches that one micro batch may hold.
        ranks_per_node: neighbours among the job's global ranks that share a node; bytes stay inside it first.
        first_step: index of the first step that this process trains, after a resume; a callable `num_microbatches`
            gets it.
        fit_steps: fit the cost model to this many steps of the run; 0 keeps the given one.
        is_first_stage: this rank holds the first pipeline stage, which needs pixels.
        agree_across_stages: other pipeline stages or tensor-parallel ranks read the same data: compare plans with
            global rank 0's at every step, and take fitted coefficients from there.
        timeout_s: seconds that a collective waits for a late rank.
        verbose: print the ranks' loads before and after, every step.
    """

    calculate_per_token_loss: bool | None = None
    threshold: float = 0.02
    tolerance: float = DEFAULT_TOLERANCE
    balance_every_slot: bool = False
    max_tokens: int | None = None
    max_patches: int | None = None
    ranks_per_node: int = 1
    first_step: int = 0
    fit_steps: int = 0
    is_first_stage: bool = True
    agree_across_stages: bool = False
    timeout_s: float = 600.0
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.calculate_per_token_loss is False:
            raise ValueError(
                "calculate_per_token_loss is off: ranks average their own tokens, so a sample that moves would change "
                "its weight (gradients were 13% off in a trial); set calculate_per_token_loss, or use scope 'encoder'"
            )
        if not 0 <= self.threshold < 1 or self.tolerance < 0:
            raise ValueError(
                f"threshold {self.threshold} and tolerance {self.tolerance} are shares of a rank's load; give "
                "0 <= threshold < 1 and a tolerance of zero or more"
            )
        for name in ("max_tokens", "max_patches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, so no sample could be placed; give a positive number or None")
        if self.ranks_per_node < 1 or min(self.fit_steps, self.first_step) < 0 or self.timeout_s <= 0:
            raise ValueError(
                f"ranks_per_node {self.ranks_per_node}, fit_steps {self.fit_steps}, first_step {self.first_step}, "
                f"timeout_s {self.timeout_s}: give at least one rank, zero or more steps and a positive timeout"
            )


@dataclass(frozen=True)
class ModelConfig:
    """What a model config file says: how many ranks one image encoder takes, and costs where sizes are given."""

    encoder_ranks: int = 1
    vision: CostModel | None = None
    language: CostModel | None = None

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Read ``{"image_encoder": {...}, "text_decoder": {...}}``.

        Of the encoder (or its inner "vision_encoder") `tensor_model_parallel_size`, `pipeline_model_parallel_size` and
        `context_parallel_size` (`tp`, `pp`, `cp` for short; 1 without) count; of both parts `hidden_size`,
        `ffn_hidden_size`, `num_layers` and the other arguments of `CostModel.for_transformer`.

        Raises:
            ValueError: the file is not such JSON, or a size is not a positive integer.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"model config {path} cannot be read ({error}); give the path of a JSON file") from error
        if not isinstance(content, dict) or not isinstance(content.get("image_encoder"), dict):
            raise ValueError(f"model config {path} has no object 'image_encoder', so its DP size is unknown; add one")
        encoder = {**content["image_encoder"], **content["image_encoder"].get("vision_encoder", {})}
        ranks = 1
        for name, short in (
            ("tensor_model_parallel_size", "tp"),
            ("pipeline_model_parallel_size", "pp"),
            ("context_parallel_size", "cp"),
        ):
            size = encoder.get(name, encoder.get(short, 1))
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} of the image encoder in {path} is {size!r}; give a positive integer")
            ranks *= size
        return cls(ranks, _cost_of(encoder), _cost_of(content.get("text_decoder", {}), causal=True))

    def check_group(self, group_size: int, world_size: int) -> None:
        """Compare the encoder's data-parallel size with the group that is to be balanced.

        Raises:
            ValueError: they differ.
        """
        if world_size % self.encoder_ranks or world_size // self.encoder_ranks != group_size:
            raise ValueError(
                f"the model config gives the image encoder tp x pp x cp = {self.encoder_ranks} of {world_size} ranks, "
                f"but the group to balance has {group_size}: samples would go to ranks that do not read them; give the "
                "data-parallel group of the encoder, or correct the model config"
            )
        if group_size == 1:
            logger.warning("data balance: the image encoder's data-parallel size is 1, so there is nothing to balance")


def choose_cost_model(
    given: CostModel | SampleCostModel | None, config: ModelConfig | None, sorting_algo_name: str
) -> SampleCostModel:
    """The given cost model (a single one weighs patches only), else the config's, else the algorithm's default."""
    if isinstance(given, SampleCostModel):
        return given
    if given is not None:
        return SampleCostModel(vision=given, language=CostModel(NEXT_TO_NOTHING, 0.0))
    if config is not None and config.vision is not None:
        language = config.language if config.language is not None else DEFAULT_COST_MODEL.language
        return SampleCostModel(vision=config.vision, language=language)
    if sorting_algo_name == "post_global_balancing_greedy_without_pad":
        return SQUARED_LENGTH
    return DEFAULT_COST_MODEL


def _cost_of(sizes: dict[str, Any], causal: bool = False) -> CostModel | None:
    required = ("hidden_size", "ffn_hidden_size", "num_layers")
    if not all(name in sizes for name in required):
        return None
    optional = (
        "full_attention_share", "window_tokens", "gated_linear_unit", "num_attention_heads", "num_query_groups",
        "num_experts_per_token", "vocab_size",
    )  # fmt: skip
    given = {name: sizes[name] for name in optional if name in sizes}
    return CostModel.for_transformer(*(sizes[name] for name in required), causal=causal, **given)
