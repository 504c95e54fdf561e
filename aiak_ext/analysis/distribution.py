"""Figures of a length distribution: spread, quantiles, short samples, and where the compute goes."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiak_ext.analysis.samples import SampleTable
from data_balance import SampleCostModel

QUANTILES = (5, 25, 50, 75, 90, 95, 99)
#: Coefficient of variation from which fixed batches of a rank waste much of the others' time.
HIGH_CV = 0.5


def length_figures(table: SampleTable, token_budget: int) -> dict[str, Any]:
    """Mean, CV, quantiles, extremes and short-sample share of the lengths in tokens.

    ``short_share`` is f_s of the Online Dynamic Batching paper (seed 003): the share of samples shorter than a
    quarter of the token budget, the second figure beside the CV that says what filling groups gains.

    Args:
        table: The samples.
        token_budget: L_max, tokens that a group may hold.
    """
    tokens = table.num_tokens
    quantiles = np.percentile(tokens, QUANTILES)
    return {
        "num_samples": len(table),
        "mean": float(tokens.mean()),
        "cv": float(tokens.std() / tokens.mean()),
        "min": int(tokens.min()),
        **{f"p{q}": float(value) for q, value in zip(QUANTILES, quantiles)},
        "max": int(tokens.max()),
        "token_budget": token_budget,
        "short_share": float((tokens < token_budget / 4).mean()),
        "packed_share": float(table.packed.mean()),
    }


def vision_figures(table: SampleTable) -> dict[str, Any] | None:
    """Patches per sample over the samples that have any; None when none has."""
    with_images = table.num_patches[table.num_patches > 0]
    if not len(with_images):
        return None
    return {
        "image_sample_share": len(with_images) / len(table),
        "mean_patches": float(with_images.mean()),
        "cv": float(with_images.std() / with_images.mean()),
        "p50": float(np.percentile(with_images, 50)),
        "p95": float(np.percentile(with_images, 95)),
        "max": int(with_images.max()),
    }


def cost_figures(table: SampleTable, costs: SampleCostModel) -> dict[str, float]:
    """How compute spreads: share of each modality, and the coefficient of variation of a sample's cost."""
    language = costs.language_cost(table.sums)
    total = costs.cost(table.sums)
    return {
        "vision_share": float(1 - language.sum() / total.sum()),
        "language_share": float(language.sum() / total.sum()),
        "cv": float(total.std() / total.mean()),
        "heaviest_over_mean": float(total.max() / total.mean()),
    }


def describe_spread(cv: float) -> str:
    """Whether a coefficient of variation is high, in words."""
    if cv >= HIGH_CV:
        return f"high variance (CV {cv:.2f}): ranks that draw at random wait for the one with the longest sample"
    return f"low variance (CV {cv:.2f}): ranks wait little for each other even unsorted"
