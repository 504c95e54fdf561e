"""Target lengths of the demo samples: the shape of a real mix, scaled to a tiny model; and the comparison."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Tokens per sample (text and visual) of the standard vision-language mix, design section 12: a blend of
# real text lengths and image sizes of public instruction, caption, OCR and chat sets, 19,302 samples.
MIX_MEAN = 698.0
MIX_CV = 0.97
#: Percent -> tokens.
MIX_PERCENTILES = {
    0: 11,
    5: 146,
    10: 184,
    25: 269,
    50: 412,
    75: 787,
    85: 1509,
    90: 1957,
    95: 2278,
    99: 2684,
    100: 6278,
}
MIX_IMAGE_SHARE = 0.49

#: The mix itself, where it lies beside the project.
MIX_FILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "lengths" / "mix_vlm_sft.csv"

#: A question and an answer of a few words take about this many tokens.
SHORTEST = 32


@dataclass(frozen=True, kw_only=True)
class LengthStats:
    """Distribution of tokens per sample; `image_share` is the share of visual tokens in all tokens."""

    num_samples: int
    mean: float
    cv: float
    p50: float
    p95: float
    max: float
    image_share: float

    @classmethod
    def of(cls, total: Sequence[int], visual: Sequence[int]) -> LengthStats:
        """Statistics of samples with `total[i]` tokens, `visual[i]` of them visual."""
        lengths = np.asarray(total, dtype=np.float64)
        p50, p95 = np.percentile(lengths, [50, 95])
        return cls(
            num_samples=len(lengths),
            mean=float(lengths.mean()),
            cv=float(lengths.std() / lengths.mean()),
            p50=float(p50),
            p95=float(p95),
            max=float(lengths.max()),
            image_share=float(np.sum(visual) / lengths.sum()),
        )


def target_lengths(num_samples: int, mean: float, longest: int, rng: random.Random) -> list[int]:
    """Lengths at evenly spaced quantiles of the mix, scaled to `mean`, in random order.

    Args:
        num_samples: How many.
        mean: Mean tokens per sample.
        longest: Cap; the mix's own tail would go to nine times the mean.
        rng: Shuffles them.
    """
    percents = (np.arange(num_samples) + 0.5) / num_samples * 100
    # Between the known percentiles the logarithm is interpolated: the density falls smoothly there.
    logs = np.interp(percents, list(MIX_PERCENTILES), np.log(list(MIX_PERCENTILES.values())))
    scaled = np.clip(np.exp(logs) * mean / MIX_MEAN, SHORTEST, longest).round().astype(int).tolist()
    rng.shuffle(scaled)
    return scaled


def mix_stats() -> tuple[LengthStats, str]:
    """Statistics of the standard mix and where they are from: its file if it is there, else the constants."""
    if not MIX_FILE.is_file():
        stats = LengthStats(
            num_samples=19_302,
            mean=MIX_MEAN,
            cv=MIX_CV,
            p50=MIX_PERCENTILES[50],
            p95=MIX_PERCENTILES[95],
            max=MIX_PERCENTILES[100],
            image_share=MIX_IMAGE_SHARE,
        )
        return stats, "published figures"
    with MIX_FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    total = [int(row["total_tokens"]) for row in rows]
    return LengthStats.of(total, [int(row["image_tokens"]) for row in rows]), MIX_FILE.name


def format_report(stats: LengthStats) -> str:
    """A table of this data set's lengths beside the mix's, also scaled to the same mean."""
    mix, source = mix_stats()
    scale = stats.mean / mix.mean
    rows = [
        ("this data set", stats, 1.0),
        ("standard mix, scaled", mix, scale),
        ("standard mix", mix, 1.0),
    ]
    lines = [f"{'tokens per sample':<22}{'samples':>8}{'mean':>8}{'CV':>6}{'p50':>7}{'p95':>7}{'max':>7}{'image':>7}"]
    for name, row, factor in rows:
        lines.append(
            f"{name:<22}{row.num_samples:>8}{row.mean * factor:>8.0f}{row.cv:>6.2f}{row.p50 * factor:>7.0f}"
            f"{row.p95 * factor:>7.0f}{row.max * factor:>7.0f}{row.image_share:>7.0%}"
        )
    return "\n".join([*lines, f"(standard mix from {source}; image = share of visual tokens)"])
