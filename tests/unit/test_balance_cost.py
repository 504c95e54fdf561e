"""Cost model: segments, FLOPs of a transformer, fitting, and no overflow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_balance import CostModel, SampleCostModel
from data_balance.cost import grid_sums


def test_cost_of_a_length_of_arrays_and_of_segments() -> None:
    model = CostModel(2.0, 0.5, 3.0)
    assert model.cost(10) == 2 * 10 + 0.5 * 100 + 3
    assert model.cost(np.array([[1, 2], [3, 4]])).shape == (2, 2)
    assert model.cost_of_segments([10, 10]) == 2 * 20 + 0.5 * 200 + 3
    assert model.cost_of_segments([]) == 0.0


def test_int32_lengths_do_not_overflow() -> None:
    lengths = np.array([200_000], dtype=np.int32)
    assert CostModel(0, 1).cost(lengths)[0] == 4e10
    assert CostModel(0, 1).cost_of_segments(lengths) == 4e10


def test_a_video_attends_within_frames() -> None:
    assert grid_sums([[8, 4, 6]]) == (8 * 24, 8 * 24**2)
    assert grid_sums([[1, 4, 6], [2, 2, 2]]) == (24 + 8, 24**2 + 2 * 16)
    assert grid_sums(np.zeros((0, 3), dtype=np.int32)) == (0, 0)
    assert grid_sums(np.array([[1, 500, 400]], dtype=np.int32))[1] == 200_000**2


def test_flops_of_a_plain_transformer() -> None:
    hidden = 2560
    model = CostModel.for_transformer(hidden, 4 * hidden, 3)
    assert model.linear == 3 * 24 * hidden**2
    assert model.quadratic == 3 * 4 * hidden
    # Divided by 4h per layer this is the 6hn + n^2 that the step efficiency is measured with.
    assert model.linear / model.quadratic == 6 * hidden


def test_flops_of_windows_groups_gates_and_the_head() -> None:
    base = CostModel.for_transformer(64, 128, 4)
    windowed = CostModel.for_transformer(64, 128, 4, 0.25, window_tokens=16)
    assert windowed.quadratic == base.quadratic / 4
    assert windowed.linear == base.linear + 4 * 0.75 * 16 * 4 * 64
    assert CostModel.for_transformer(64, 128, 4, causal=True).quadratic == base.quadratic / 2
    grouped = CostModel.for_transformer(64, 128, 4, num_attention_heads=8, num_query_groups=2)
    assert base.linear - grouped.linear == 4 * 4 * 64 * 64 * 0.75
    gated = CostModel.for_transformer(64, 128, 4, gated_linear_unit=True)
    assert gated.linear - base.linear == 4 * 2 * 64 * 128
    assert CostModel.for_transformer(64, 128, 4, vocab_size=100).linear - base.linear == 2 * 64 * 100


@settings(max_examples=50, deadline=None)
@given(
    linear=st.floats(1e-6, 1e-3),
    quadratic=st.floats(0, 1e-8),
    constant=st.floats(0, 0.1),
    lengths=st.lists(st.integers(1, 50_000), min_size=5, max_size=30, unique=True),
)
def test_fit_reproduces_exact_times(linear: float, quadratic: float, constant: float, lengths: list[int]) -> None:
    times = CostModel(linear, quadratic, constant).cost(lengths)
    fitted = CostModel.fit(lengths, times)
    assert np.allclose(fitted.cost(lengths), times, rtol=1e-5)


def test_fit_takes_segments_and_stays_non_negative() -> None:
    truth = CostModel(1e-4, 1e-7)
    segments = [[100], [50, 50], [2000], [1000, 1000], [300, 10]]
    fitted = CostModel.fit(segments, [truth.cost_of_segments(s) for s in segments])
    assert fitted.quadratic == pytest.approx(1e-7) and fitted.linear == pytest.approx(1e-4)
    falling = CostModel.fit([1, 2, 3], [3.0, 2.0, 1.0])
    assert min(falling.linear, falling.quadratic, falling.constant) >= 0


def test_sample_cost_adds_both_parts_and_is_fitted_at_once() -> None:
    truth = SampleCostModel(vision=CostModel(3e-6, 2e-9), language=CostModel(1e-5, 1e-9, 0.001))
    rng = np.random.default_rng(0)
    tokens, patches = rng.integers(10, 4000, 40), rng.integers(0, 3000, 40)
    sums = np.column_stack([tokens, tokens**2, patches, patches**2])
    times = truth.cost(sums)
    assert times[0] == pytest.approx(
        truth.language.cost(int(tokens[0])) + truth.vision.cost_of_sums(patches[0], patches[0] ** 2)
    )
    fitted = SampleCostModel.fit(sums, np.ones(40), times)
    assert np.allclose(fitted.cost(sums), times, rtol=1e-6)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: CostModel(-1, 0), "non-negative"),
        (lambda: CostModel(0, 0), "positive"),
        (lambda: CostModel(float("inf"), 0), "finite"),
        (lambda: CostModel.for_transformer(0, 1, 1), "hidden_size is 0"),
        (lambda: CostModel.for_transformer(8, 8, 1, 1.5), "full_attention_share"),
        (lambda: CostModel.fit([5, 5], [1, 1]), "same lengths"),
        (lambda: CostModel.fit([5, 6], [1]), "1 times"),
        (lambda: CostModel.fit([5, 6], [1, -1]), "positive number of seconds"),
    ],
)
def test_bad_input_is_refused(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]
