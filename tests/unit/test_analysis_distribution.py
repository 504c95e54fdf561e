"""Figures of length distributions and the tests that compare ranks, workers and shards."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2_contingency, ks_2samp

from aiak_ext.analysis.distribution import cost_figures, describe_spread, length_figures, vision_figures
from aiak_ext.analysis.same_distribution import compare_groups
from aiak_ext.analysis.samples import SampleTable
from aiak_ext.analysis.text_table import format_table
from data_balance import CostModel, SampleCostModel


def test_length_figures_of_known_lengths() -> None:
    table = SampleTable(source="x", num_tokens=np.array([10, 20, 30, 40]), packed=np.array([True, False, False, False]))
    figures = length_figures(table, token_budget=100)
    assert figures["mean"] == 25
    assert figures["cv"] == pytest.approx(np.sqrt(125) / 25)
    assert (figures["min"], figures["p50"], figures["max"]) == (10, 25, 40)
    assert figures["short_share"] == 0.5  # 10 and 20 are below 25
    assert figures["packed_share"] == 0.25
    assert "high variance" in describe_spread(0.97) and "low variance" in describe_spread(0.1)


def test_vision_and_cost_figures_of_known_samples() -> None:
    table = SampleTable(source="x", num_tokens=np.array([10, 10]), num_patches=np.array([0, 20]))
    vision = vision_figures(table)
    assert vision is not None
    assert vision["image_sample_share"] == 0.5 and vision["mean_patches"] == 20
    costs = SampleCostModel(vision=CostModel(1.0, 0.0), language=CostModel(2.0, 0.0))
    figures = cost_figures(table, costs)
    assert figures["vision_share"] == pytest.approx(20 / 60)
    assert figures["language_share"] == pytest.approx(40 / 60)
    assert figures["heaviest_over_mean"] == pytest.approx(40 / 30)
    assert vision_figures(SampleTable(source="x", num_tokens=np.array([10]))) is None


def test_ranks_of_one_distribution_pass_and_a_shifted_one_stands_out() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.lognormal(5, 1, 4000).astype(np.int64) + 1
    ranks = np.repeat(np.arange(8), 500)
    same = compare_groups("rank", ranks, tokens)
    assert same is not None and same.same and same.num_groups == 8
    assert same.p_value > 0.01
    tokens[ranks == 5] *= 2
    shifted = compare_groups("rank", ranks, tokens)
    assert shifted is not None and [one.name for one in shifted.outliers] == ["5"]
    # The values are scipy's.
    expected = ks_2samp(tokens[ranks == 5], tokens[ranks != 5], method="asymp")
    assert shifted.outliers[0].distance == pytest.approx(expected.statistic)
    assert shifted.outliers[0].p_value == pytest.approx(expected.pvalue)
    assert shifted.largest_distance_of == "5"
    edges = np.quantile(tokens, np.linspace(0.1, 0.9, 9))
    bins = np.searchsorted(edges, tokens, side="right")
    counts = np.stack([np.bincount(bins[ranks == rank], minlength=10) for rank in range(8)])
    assert shifted.statistic == pytest.approx(chi2_contingency(counts).statistic)
    assert shifted.degrees_of_freedom == 63
    assert "chi-square over deciles" in shifted.describe() and "1 stand out" in shifted.describe()


def test_significant_but_tiny_differences_do_not_stand_out() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 1000, 100_000)
    tokens[:50_000] += 40
    comparison = compare_groups("shard", np.repeat(["a", "b"], 50_000), tokens)
    assert comparison is not None
    assert comparison.p_value < 1e-10
    assert comparison.same


def test_small_and_single_groups_are_left_out() -> None:
    tokens = np.arange(1, 101)
    assert compare_groups("rank", [0] * 100, tokens) is None
    assert compare_groups("rank", [0] * 90 + [1] * 10, tokens) is None
    comparison = compare_groups("rank", [0] * 45 + [1] * 45 + [2] * 10, tokens)
    assert comparison is not None and comparison.num_groups == 2
    constant = compare_groups("rank", [0] * 50 + [1] * 50, np.full(100, 7))
    assert constant is not None and constant.same and constant.p_value == 1


def test_table_aligns_text_left_and_numbers_right() -> None:
    table = format_table([{"name": "a", "share": 0.5, "n": 12345}, {"name": "bcd", "share": None, "n": 1}])
    expected = ["name  share      n", "----  -----  -----", "a     0.500  12345", "bcd       -      1"]
    assert table.splitlines() == expected
