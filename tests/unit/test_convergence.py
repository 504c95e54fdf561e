"""The convergence guard: orders that correlate with length are found, shuffled ones are left alone."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from aiak_ext.convergence import FEWEST_STEPS, MOST_STEPS, OrderGuard, order_figures
from aiak_ext.metrics import StepRecorder

POOL = 50


def lengths(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(6, 1, count)


def in_pools(order: Callable[[list[float], int], list[float]], num_pools: int = 20) -> list[float]:
    """Steps of one sample each, pool by pool; `order` takes a pool and its index."""
    pools = lengths(POOL * num_pools).reshape(num_pools, POOL)
    return [length for index, pool in enumerate(pools) for length in order(list(pool), index)]


def shuffled(pool: list[float], seed: int) -> list[float]:
    pool = sorted(pool)
    random.Random(seed).shuffle(pool)
    return pool


def test_sorted_windows_correlate_from_step_to_step() -> None:
    figures = order_figures(in_pools(lambda pool, _: sorted(pool)))
    assert figures.is_correlated
    assert figures.strongest_lag % POOL == 0
    assert figures.autocorrelation > 0.8


def test_lengths_that_drift_correlate_most_with_their_neighbours() -> None:
    drift = np.convolve(np.random.default_rng(0).normal(size=600), np.ones(5), mode="valid")
    figures = order_figures(np.exp(drift))
    assert figures.is_correlated
    assert figures.strongest_lag == 1


def test_pools_that_share_a_permutation_correlate_a_pool_apart() -> None:
    figures = order_figures(in_pools(lambda pool, _: shuffled(pool, 42)))
    assert figures.is_correlated
    assert figures.strongest_lag % POOL == 0
    assert abs(figures.autocorrelation) < 0.2


def test_pools_with_seeds_of_their_own_do_not() -> None:
    figures = order_figures(in_pools(shuffled))
    assert not figures.is_correlated
    assert "does not correlate" in figures.describe()


def test_a_slow_trend_is_found() -> None:
    figures = order_figures(lengths(1000) * np.linspace(1, 2, 1000))
    assert figures.is_correlated
    assert figures.trend > 0.1
    assert abs(figures.autocorrelation) < 0.1


def test_exact_figures_of_a_small_series() -> None:
    series = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0, 8.0, 9.0, 7.0, 9.0, 3.0]
    figures = order_figures(series)
    ranks = np.array([5, 1.5, 7, 1.5, 9, 15, 3, 11, 9, 5, 9, 13, 15, 12, 15, 5])
    ranks = (ranks - ranks.mean()) / ranks.std()
    assert figures.autocorrelation == pytest.approx((ranks[1:] * ranks[:-1]).mean())
    assert figures.trend == pytest.approx(spearmanr(series, range(16)).statistic)


def test_few_or_equal_steps_are_not_judged() -> None:
    few = order_figures(np.arange(FEWEST_STEPS - 1))
    assert not few.is_correlated
    assert "too few" in few.describe()
    assert not order_figures([7.0] * 100).is_correlated
    assert order_figures([1.0, float("nan")] * 20).num_steps == 20


def test_false_alarms_are_as_rare_as_promised() -> None:
    """200 shuffled runs at a chance of one in a thousand each: three or more happen once in a thousand times."""
    alarms = sum(order_figures(lengths(300, seed)).is_correlated for seed in range(200))
    assert alarms <= 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1, 1e6), min_size=FEWEST_STEPS, max_size=200))
def test_only_the_order_of_lengths_counts(series: list[float]) -> None:
    figures, scaled = order_figures(series), order_figures(np.log(series))
    if len(set(np.log(series))) == len(set(series)):
        assert scaled.strongest == pytest.approx(figures.strongest)
        assert scaled.is_correlated == figures.is_correlated
    assert abs(figures.trend) <= 1 + 1e-9


def test_the_guard_warns_once_and_looks_back_a_bounded_number_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    guard = OrderGuard()
    series = in_pools(lambda pool, _: sorted(pool), num_pools=40)
    with caplog.at_level(logging.WARNING):
        for start in range(0, len(series), 10):
            figures = guard.observe([2.0] * 10, [2 * value for value in series[start : start + 10]])
    assert len(caplog.records) == 1
    assert "order correlates with length" in caplog.text
    assert "seed of its own" in caplog.text
    assert figures.num_steps == MOST_STEPS
    assert figures.autocorrelation == order_figures(series[-MOST_STEPS:]).autocorrelation


def test_idle_steps_are_left_out_and_silenced_guards_stay_silent(caplog: pytest.LogCaptureFixture) -> None:
    guard = OrderGuard(warn=False)
    with caplog.at_level(logging.WARNING):
        figures = guard.observe([1.0, 0.0] * 40, [float(n) for n in range(80)])
    assert figures.num_steps == 40
    assert figures.is_correlated
    assert not caplog.records


def record_run(directory, series: list[float]) -> None:
    with StepRecorder(directory) as recorder:
        for tokens in series:
            recorder.start_step()
            recorder.add_batch(num_samples=1, num_tokens=int(tokens), num_token_slots=int(tokens), cost=tokens)
            recorder.end_step()


def test_a_recorded_run_is_watched(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with caplog.at_level(logging.WARNING):
        record_run(tmp_path / "shuffled", in_pools(shuffled, num_pools=4))
        assert "correlates" not in caplog.text
        record_run(tmp_path / "sorted", in_pools(lambda pool, _: sorted(pool), num_pools=4))
    assert "order correlates with length" in caplog.text
    events = EventAccumulator(str(tmp_path / "sorted")).Reload()
    points = events.Scalars("convergence/length_autocorrelation")
    assert [point.step for point in points] == [19, *range(29, 200, 10)]  # 10 steps are too few to judge
    assert points[-1].value > 0.8
    assert events.Scalars("convergence/samples_per_step")[-1].value == 1.0
