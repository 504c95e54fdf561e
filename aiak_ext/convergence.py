"""Whether the order of a run correlates with length, and how evenly it feeds the optimizer.

Sorted windows, equal permutations in all pools and data in phases let long and short samples come in waves, which
shows as periodic loss spikes. `OrderGuard` watches for it during a run, the report after it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

logger = logging.getLogger(__name__)

#: Chance of calling an order correlated that is not, over all lags together.
FALSE_ALARM = 0.001
#: A significant correlation below this is too weak to matter.
SMALLEST_CORRELATION = 0.1
#: Fewer steps than this say nothing about their order.
FEWEST_STEPS = 16
#: Most steps that the guard looks back on.
MOST_STEPS = 1024


@dataclass(frozen=True, kw_only=True)
class OrderFigures:
    """How the mean sample length of steps correlates over time; of ranks (Spearman), so that outliers do not rule."""

    num_steps: int
    autocorrelation: float
    """Between one step and the next."""
    strongest: float
    """Autocorrelation at the lag where it stands out most; NaN below `FEWEST_STEPS`."""
    strongest_lag: int
    """That lag, in steps: a pool's number of steps where pools are alike in order, 1 where order drifts."""
    trend: float
    """Correlation of length with the step's index."""
    is_correlated: bool

    def describe(self) -> str:
        """One sentence with the numbers."""
        if self.num_steps < FEWEST_STEPS:
            return f"{self.num_steps} steps are too few to tell whether order correlates with length"
        verdict = "correlates" if self.is_correlated else "does not correlate"
        return (
            f"order {verdict} with length: over {self.num_steps} steps the autocorrelation of the mean sample length "
            f"is {self.autocorrelation:.2f} from step to step and at most {self.strongest:.2f} "
            f"(lag {self.strongest_lag}), its correlation with time {self.trend:.2f}"
        )


REMEDY = (
    "Long and short samples come in waves, and the loss with them. Check that pools are shuffled after sorting, that "
    "every pool has a seed of its own, and that the data set is shuffled (shuffle_buffer_size, blend) before the lever"
)


def order_figures(mean_lengths: ArrayLike) -> OrderFigures:
    """Test whether the steps of a run are in an order that correlates with length.

    Independent steps have autocorrelations of variance 1 / (number of pairs), for any distribution of lengths since
    ranks are compared. Each lag up to half the run is tested, and the trend; the chance of a false alarm is
    `FALSE_ALARM` over all of these (Bonferroni).

    Args:
        mean_lengths: Tokens per sample of each step, over all data-parallel ranks [steps]; NaN for a step without
            samples, which is left out.
    """
    values = np.asarray(mean_lengths, dtype=np.float64)
    values = values[~np.isnan(values)]
    n = len(values)
    if n < FEWEST_STEPS or np.ptp(values) == 0:
        nothing = math.nan if n < FEWEST_STEPS else 0.0
        return OrderFigures(
            num_steps=n, autocorrelation=nothing, strongest=nothing, strongest_lag=0, trend=nothing, is_correlated=False
        )
    ranks = _standard_ranks(values)
    correlations = _autocorrelations(ranks, n // 2)
    scores = np.abs(correlations) * np.sqrt(n - np.arange(1, n // 2 + 1))
    strongest = int(scores.argmax())
    trend = float(np.mean(ranks * _standard_ranks(np.arange(n, dtype=np.float64))))
    limit = NormalDist().inv_cdf(1 - FALSE_ALARM / 2 / (len(scores) + 1))
    tests = ((abs(trend), abs(trend) * math.sqrt(n - 1)), (abs(correlations[strongest]), scores[strongest]))
    return OrderFigures(
        num_steps=n,
        autocorrelation=float(correlations[0]),
        strongest=float(correlations[strongest]),
        strongest_lag=strongest + 1,
        trend=trend,
        is_correlated=any(value > SMALLEST_CORRELATION and score > limit for value, score in tests),
    )


class OrderGuard:
    """Watches the steps of a running training and warns once when their order correlates with length.

    Args:
        warn: Whether this process logs the warning: one rank is enough.
    """

    def __init__(self, *, warn: bool = True) -> None:
        self._mean_lengths: deque[float] = deque(maxlen=MOST_STEPS)
        self._will_warn = warn

    def observe(self, num_samples: Sequence[float], num_tokens: Sequence[float]) -> OrderFigures:
        """Add steps and judge the last `MOST_STEPS`.

        Args:
            num_samples: Of each new step, over all ranks.
            num_tokens: Likewise, padding left out.
        """
        self._mean_lengths.extend(tokens / samples for samples, tokens in zip(num_samples, num_tokens) if samples)
        figures = order_figures(list(self._mean_lengths))
        if figures.is_correlated and self._will_warn:
            self._will_warn = False
            logger.warning("%s. %s.", figures.describe(), REMEDY)
        return figures


def _standard_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks [n] of mean 0 and variance 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return (ranks - ranks.mean()) / ranks.std()


def _autocorrelations(values: NDArray[np.float64], num_lags: int) -> NDArray[np.float64]:
    """Mean product of standardised values 1 to `num_lags` steps apart [num_lags], through the Fourier transform."""
    n = len(values)
    power = np.abs(np.fft.rfft(values, 2 * n)) ** 2  # padded with zeros, so that the end does not meet the start
    return np.fft.irfft(power)[1 : num_lags + 1] / (n - np.arange(1, num_lags + 1))
