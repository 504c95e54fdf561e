"""Whether groups of samples (ranks, workers, shards) draw their lengths from one distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, ks_2samp

#: Groups smaller than this say nothing about their distribution.
SMALLEST_GROUP = 20
#: Chance, over all groups together, of calling a group different that is not.
FALSE_ALARM = 0.01
#: Kolmogorov-Smirnov distance below which a significant difference does not matter: positions of two sorted pools
#: are then off by less than a tenth of the pool.
SMALLEST_DISTANCE = 0.1
_NUM_BINS = 10


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A group whose lengths differ from those of all others together."""

    name: str
    num_samples: int
    mean_tokens: float
    distance: float
    """Largest difference of the two cumulative distributions (Kolmogorov-Smirnov D), 0 to 1."""
    p_value: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of comparing groups: one test over all of them, one for each against the rest."""

    kind: str
    """What the groups are: rank, worker or shard."""
    num_groups: int
    test: str
    statistic: float
    degrees_of_freedom: int
    p_value: float
    largest_distance: float
    """Largest Kolmogorov-Smirnov D of a group against the rest."""
    largest_distance_of: str
    outliers: tuple[Outlier, ...]

    @property
    def same(self) -> bool:
        """Whether no group stands out."""
        return not self.outliers

    def describe(self) -> str:
        """One line with the tests' names and values."""
        verdict = "the same distribution" if self.same else f"{len(self.outliers)} stand out"
        return (
            f"{self.kind} against {self.kind} ({self.num_groups}): {verdict}; {self.test} = {self.statistic:.1f} "
            f"(df {self.degrees_of_freedom}, p = {self.p_value:.3g}), largest Kolmogorov-Smirnov D = "
            f"{self.largest_distance:.3f} ({self.kind} {self.largest_distance_of} against the rest)"
        )


def compare_groups(kind: str, labels: Sequence[Any] | NDArray[Any], num_tokens: NDArray[np.int64]) -> Comparison | None:
    """Compare the lengths of groups with each other.

    Chi-square of independence over deciles of all lengths (does anything differ at all?), and a two-sample
    Kolmogorov-Smirnov test of each group against the rest (which one?). A group stands out when its test passes
    `FALSE_ALARM`, divided by the number of groups (Bonferroni), and its distance passes `SMALLEST_DISTANCE`.

    Args:
        kind: What a group is, e.g. ``rank``.
        labels: Group of each sample [n].
        num_tokens: Length of each sample [n].

    Returns:
        None when fewer than two groups have `SMALLEST_GROUP` samples.
    """
    groups = np.asarray(labels)
    names, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    large = counts >= SMALLEST_GROUP
    if large.sum() < 2:
        return None
    keep = large[index]
    index, tokens = index[keep], num_tokens[keep]
    names, index = names[large], np.unique(index, return_inverse=True)[1]
    statistic, p_value, freedom = _chi_square(index, len(names), tokens)
    singles = [_against_rest(str(name), tokens[index == i], tokens[index != i]) for i, name in enumerate(names)]
    limit = FALSE_ALARM / len(names)
    outliers = [one for one in singles if one.p_value < limit and one.distance > SMALLEST_DISTANCE]
    farthest = max(singles, key=lambda one: one.distance)
    return Comparison(
        kind=kind,
        num_groups=len(names),
        test="chi-square over deciles",
        statistic=statistic,
        degrees_of_freedom=freedom,
        p_value=p_value,
        largest_distance=farthest.distance,
        largest_distance_of=farthest.name,
        outliers=tuple(sorted(outliers, key=lambda one: -one.distance)),
    )


def _chi_square(index: NDArray[np.int64], num_groups: int, tokens: NDArray[np.int64]) -> tuple[float, float, int]:
    """Statistic, p value and degrees of freedom of groups against bins of equal count."""
    edges = np.unique(np.quantile(tokens, np.linspace(0, 1, _NUM_BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, tokens, side="right")
    table = np.zeros((num_groups, len(edges) + 1), dtype=np.int64)
    np.add.at(table, (index, bins), 1)
    table = table[:, table.any(axis=0)]
    if table.shape[1] < 2:
        return 0.0, 1.0, 0
    result = chi2_contingency(table)
    return float(result.statistic), float(result.pvalue), int(result.dof)


def _against_rest(name: str, own: NDArray[np.int64], rest: NDArray[np.int64]) -> Outlier:
    result = ks_2samp(own, rest, method="asymp")
    return Outlier(
        name=name,
        num_samples=len(own),
        mean_tokens=float(own.mean()),
        distance=float(result.statistic),
        p_value=float(result.pvalue),
    )
