"""Compute cost of sequences: linear in tokens, quadratic in attention segments, derived or fitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

#: Coefficient of a part that weighs nothing beside the other.
NEXT_TO_NOTHING = 1e-30


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence: ``linear * n + quadratic * sum(n_i ** 2) + constant`` over its attention segments.

    Costs are relative (FLOPs, or seconds when fitted); only their ratios matter to a planner.

    Raises:
        ValueError: a coefficient is negative, not finite, or all three are zero.
    """

    linear: float
    quadratic: float
    constant: float = 0.0

    def __post_init__(self) -> None:
        coefficients = np.array([self.linear, self.quadratic, self.constant], dtype=np.float64)
        if not np.isfinite(coefficients).all() or (coefficients < 0).any() or not coefficients.any():
            raise ValueError(
                f"CostModel coefficients (linear, quadratic, constant) are {tuple(coefficients.tolist())}; a "
                "cost has to grow with length, so give finite, non-negative numbers of which at least one is "
                "positive"
            )

    def cost(self, n: ArrayLike) -> Any:
        """Cost of one length (a float) or of an array of lengths, one attention segment each (float64, same shape).

        Lengths become float64 before they are squared: an int32 length of 200,000 must not overflow.
        """
        lengths = np.asarray(n, dtype=np.float64)
        costs = self.linear * lengths + self.quadratic * lengths * lengths + self.constant
        return float(costs) if costs.ndim == 0 else costs

    def cost_of_segments(self, segments: ArrayLike) -> float:
        """Cost of one sequence made of attention segments of the given lengths, e.g. a video's frames."""
        lengths = np.asarray(segments, dtype=np.float64)
        return float(self.cost_of_sums(lengths.sum(), np.square(lengths).sum()))

    def cost_of_sums(self, num_tokens: ArrayLike, sum_squares: ArrayLike) -> NDArray[np.float64]:
        """Cost from each sequence's token count and sum of squared segment lengths; nothing costs nothing."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        squares = np.asarray(sum_squares, dtype=np.float64)
        return np.where(tokens > 0, self.linear * tokens + self.quadratic * squares + self.constant, 0.0)

    @classmethod
    def for_transformer(
        cls,
        hidden_size: int,
        ffn_hidden_size: int,
        num_layers: int,
        full_attention_share: float = 1.0,
        *,
        window_tokens: int = 0,
        gated_linear_unit: bool = False,
        causal: bool = False,
        num_attention_heads: int | None = None,
        num_query_groups: int | None = None,
        num_experts_per_token: int = 1,
        vocab_size: int = 0,
    ) -> CostModel:
        """Forward FLOPs of a transformer (the backward pass is twice that in every term, so ratios hold).

        Per token and layer: query, key, value and output projections, then two MLP matrices (three when
        gated). Per pair of tokens and fully attending layer: ``4 * hidden_size`` (scores and weighted
        values), half of it when causal.

        Args:
            hidden_size: model width.
            ffn_hidden_size: inner width of the MLP, of one expert under mixture of experts.
            num_layers: number of layers.
            full_attention_share: share of layers that attend over a whole segment; the others attend within
                windows.
            window_tokens: tokens in a window of those others; their attention is linear in length.
            gated_linear_unit: the MLP has a gate (SwiGLU).
            causal: a token attends to earlier ones only.
            num_attention_heads: with `num_query_groups`, the share of key/value heads; full size without.
            num_query_groups: key/value heads of grouped-query attention.
            num_experts_per_token: experts that process each token.
            vocab_size: adds the output projection; 0 for a vision encoder.

        Raises:
            ValueError: a dimension is not positive, or the share is outside 0..1.
        """
        sizes = {"hidden_size": hidden_size, "ffn_hidden_size": ffn_hidden_size, "num_layers": num_layers}
        for name, value in sizes.items():
            if value <= 0:
                raise ValueError(f"{name} is {value}; a cost cannot be derived from it: give the model's real size")
        if not 0.0 <= full_attention_share <= 1.0:
            raise ValueError(f"full_attention_share is {full_attention_share}; it is a share of layers: give 0..1")
        kv_share = num_query_groups / num_attention_heads if num_query_groups and num_attention_heads else 1.0
        projections = 4.0 * hidden_size * hidden_size * (1.0 + kv_share)
        mlp = 2.0 * hidden_size * ffn_hidden_size * (3 if gated_linear_unit else 2) * num_experts_per_token
        per_pair = (2.0 if causal else 4.0) * hidden_size
        windowed = (1.0 - full_attention_share) * window_tokens * 4.0 * hidden_size
        return cls(
            linear=num_layers * (projections + mlp + windowed) + 2.0 * hidden_size * vocab_size,
            quadratic=num_layers * full_attention_share * per_pair,
        )

    @classmethod
    def fit(cls, lengths: Iterable[int | Sequence[int]], times: ArrayLike) -> CostModel:
        """Non-negative least squares of measured times on the model's three terms.

        Args:
            lengths: per measurement a length, or the lengths of its attention segments.
            times: seconds, one per measurement.

        Raises:
            ValueError: fewer than two different measurements, unequal numbers, or times that are not
                positive.
        """
        segments = [np.atleast_1d(np.asarray(n, dtype=np.float64)) for n in lengths]
        columns = np.array([[s.sum(), np.square(s).sum(), 1.0] for s in segments]).reshape(-1, 3)
        linear, quadratic, constant = fit_non_negative(columns, times)
        return cls(linear=linear, quadratic=quadratic, constant=constant)


@dataclass(frozen=True)
class SampleCostModel:
    """A sample costs what its patches cost the vision encoder plus what its tokens cost the language model."""

    vision: CostModel
    language: CostModel

    def cost(self, sums: NDArray[np.int64]) -> NDArray[np.float64]:
        """Costs [n] of samples given `sums` [n, 4]: tokens, token squares, patches, patch squares."""
        return self.language_cost(sums) + self.vision.cost_of_sums(sums[:, 2], sums[:, 3])

    def language_cost(self, sums: NDArray[np.int64]) -> NDArray[np.float64]:
        """The language model's part of `cost`."""
        return self.language.cost_of_sums(sums[:, 0], sums[:, 1])

    @classmethod
    def fit(cls, sums: ArrayLike, counts: ArrayLike, times: ArrayLike) -> SampleCostModel:
        """Fit both models at once to whole steps.

        Args:
            sums: [measurements, 4] summed tokens, token squares, patches, patch squares of a rank's step.
            counts: [measurements] samples in that step; carries the constant.
            times: [measurements] seconds of computation.
        """
        columns = np.column_stack([np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)])
        token, token_square, patch, patch_square, constant = fit_non_negative(columns, times)
        # A text-only run says nothing about patches (and the reverse): zero there, but a model needs a
        # positive term.
        vision = CostModel(max(patch, NEXT_TO_NOTHING), patch_square)
        return cls(vision=vision, language=CostModel(max(token, NEXT_TO_NOTHING), token_square, constant))


def fit_non_negative(columns: ArrayLike, times: ArrayLike) -> list[float]:
    """Non-negative coefficients [k] with ``columns @ coefficients`` closest to `times`; columns [m, k].

    Columns are scaled to a maximum of one first: squares of lengths are 1e8 times the constant's column.

    Raises:
        ValueError: too little, non-finite or non-positive input.
    """
    matrix, seconds = np.asarray(columns, dtype=np.float64), np.asarray(times, dtype=np.float64)
    if len(matrix) != len(seconds):
        raise ValueError(f"{len(matrix)} measurements but {len(seconds)} times; give one time per measurement")
    if len(np.unique(matrix, axis=0)) < 2:
        raise ValueError("all measurements are of the same lengths, so no slope can be fitted; measure several lengths")
    if not np.isfinite(seconds).all() or (seconds <= 0).any():
        raise ValueError("a measured time is not a positive number of seconds; leave failed measurements out")
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(matrix / scale, seconds)
    return [float(c) for c in coefficients / scale]


def grid_sums(grid_thw: Any) -> tuple[int, int]:
    """Patches and sum of squared attention segments of images or videos [num, 3] (t, h, w in patches).

    A video attends within each frame, so t frames of h x w patches are t segments: ``t * (h * w) ** 2``.
    """
    grid = np.asarray(grid_thw, dtype=np.int64).reshape(-1, 3)
    frame = grid[:, 1] * grid[:, 2]
    return int((grid[:, 0] * frame).sum()), int((grid[:, 0] * frame * frame).sum())
