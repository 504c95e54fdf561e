"""The benchmarks' measurements on tiny input: right where the answer is known, never a statement about time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from megatron.energon.wrappers import BatchDataset

from benchmarks import common, final_loss, pool_stall, step_efficiency, worker_dilution, wrapper_overhead
from length_sort import LengthPoolSortDataset


def lengths(count: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 5000, count)


def test_fallback_lengths_have_the_mixs_shape_and_say_so(tmp_path: Path) -> None:
    data = common.load_lengths(tmp_path / "absent.csv")
    assert "lognormal" in data.source and "absent.csv is not here" in data.source
    assert len(data.num_tokens) == 19_302
    assert data.num_tokens.min() >= 1
    assert data.num_tokens.mean() == pytest.approx(698, rel=0.03)
    assert data.num_tokens.std() / data.num_tokens.mean() == pytest.approx(0.97, rel=0.05)
    assert np.array_equal(data.num_tokens, common.load_lengths(tmp_path / "absent.csv").num_tokens)


def test_csv_lengths_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mix.csv"
    path.write_text("id,total_tokens\na,5\nb,7\n")
    data = common.load_lengths(path)
    assert data.num_tokens.tolist() == [5, 7]
    assert data.source == "mix.csv"


def test_dealt_streams_hold_every_sample_once_per_pass() -> None:
    tokens = np.arange(1, 13)
    streams = common.deal_streams(tokens, 3, 8)
    assert streams.shape == (3, 8)
    assert sorted(streams[:, :4].ravel()) == tokens.tolist()
    assert sorted(streams[:, 4:].ravel()) == tokens.tolist()


def test_cost_is_the_designs_formula_without_overflow() -> None:
    assert common.token_cost(np.array([1, 200_000], dtype=np.int32)).tolist() == [15_361.0, 43_072_000_000.0]


def test_pooled_order_is_the_wrappers_order() -> None:
    tokens = lengths(50)
    config = common.single_worker()
    stream = common.SyntheticStream(tokens.tolist(), worker_config=config)
    dataset = LengthPoolSortDataset(stream, pool_size=16, shuffle_block=4, worker_config=config)
    with common.active_worker(config):
        emitted = [sample.total_len for sample in dataset]
    assert common.pooled_order(tokens, pool_size=16, shuffle_block=4).tolist() == emitted
    assert common.pooled_order(tokens, pool_size=0).tolist() == tokens.tolist()


def test_step_efficiency_of_known_costs() -> None:
    assert common.step_efficiency(np.array([[1.0, 4.0], [3.0, 4.0]])) == pytest.approx((2 + 4) / (3 + 4))


def test_table_and_json(tmp_path: Path) -> None:
    table = common.format_table([{"name": "a", "share": 0.5}, {"name": "bcd", "share": None}])
    assert table.splitlines() == ["name  share", "----  -----", "   a  0.500", " bcd      -"]
    common.write_json(tmp_path / "deep" / "out.json", {"rows": [1]})
    assert json.loads((tmp_path / "deep" / "out.json").read_text())["rows"] == [1]


def test_final_losses_are_compared_in_standard_deviations_of_the_runs_without_a_lever(tmp_path: Path) -> None:
    without, lever = final_loss.compare({"none": [1.0, 2.0, 3.0], "sorted": [2.0, 2.0, 3.5]})
    assert without["difference"] == 0 and without["std"] == pytest.approx(1.0)
    assert lever["mean"] == pytest.approx(2.5)
    assert lever["in stds of without"] == pytest.approx(0.5)
    final_loss.plot_curve(np.linspace(8, 4, 30).tolist(), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_measured_padding_and_useful_share_of_known_batches() -> None:
    ordered = np.array([[100, 300], [200, 200]])
    result = step_efficiency.measure(ordered, micro_batch=2)
    cost = common.token_cost(np.array([100, 200, 300])).tolist()
    assert result["padding"] == pytest.approx(1 - 800 / 1000)
    assert result["efficiency"] == pytest.approx((cost[2] + cost[1]) / 2 / cost[2])
    assert result["useful"] == pytest.approx((cost[0] + cost[2] + 2 * cost[1]) / 2 / (2 * cost[2]))


def test_sorting_raises_efficiency_up_to_the_bound_and_blocks_remove_padding() -> None:
    streams = common.deal_streams(lengths(4000), 8, 400)
    results = {
        (pool, block): step_efficiency.measure(step_efficiency.order_streams(streams, pool, block), 4)
        for pool, block in ((0, 1), (100, 1), (100, 4))
    }
    bound = step_efficiency.pool_bound(streams, 100)
    assert results[0, 1]["efficiency"] + 0.05 < results[100, 4]["efficiency"] <= 1
    assert results[100, 4]["padding"] < 0.1 < 0.3 < results[100, 1]["padding"]
    assert results[0, 1]["useful"] < results[100, 1]["useful"] < results[100, 4]["useful"] < bound < 1


def test_settings_and_stream_lengths_cover_whole_pools() -> None:
    settings = step_efficiency.settings_for(8, (100, 1000))
    assert len({(s.pool, s.micro_batch, s.block) for s in settings}) == len(settings) == 8
    for num_ranks in (2, 1024, 5000):
        assert step_efficiency.stream_length_for(num_ranks, (100, 250)) % 500 == 0
        assert step_efficiency.stream_length_for(num_ranks, (100, 250)) > 0


def test_dilution_depends_on_the_pool_not_on_the_workers() -> None:
    streams = common.deal_streams(lengths(4000), 8, 500).reshape(2, 4, 500)
    off, split, whole = (worker_dilution.measure(streams, pool) for pool in (0, 10, 250))
    assert abs(off["rank_correlation"]) < 0.1
    assert off["rank_correlation"] < split["rank_correlation"] < whole["rank_correlation"]
    assert whole["rank_correlation"] > 0.95
    assert whole["efficiency"] > off["efficiency"] + 0.1
    assert abs(whole["next_step"]) < 0.2 < 0.5 < whole["next_step_shared_seed"]


def test_ranks_take_their_workers_in_turn() -> None:
    streams = np.arange(12).reshape(1, 3, 4)
    assert worker_dilution.rank_streams(streams, 0).tolist() == [[0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]]


def test_overhead_compares_datasets_that_emit_the_same_samples() -> None:
    tokens = lengths(60).tolist()
    for make in wrapper_overhead.dataset_makers(tokens, 16).values():
        dataset = make()
        if isinstance(dataset, BatchDataset):
            dataset = dataset.dataset  # a batch stands for its samples and holds one of them
        with common.active_worker(dataset.worker_config):
            emitted = [sample for element in dataset for sample in getattr(element, "samples", [element])]
        assert sorted(sample.total_len for sample in emitted) == sorted(tokens)
    times = wrapper_overhead.measure(tokens, 16, repeats=2)
    assert all(len(values) == 2 for values in times.values())
    assert wrapper_overhead.overheads({"bare stream": [1.0, 2.0, 1.0], "LengthPoolSortDataset": [5.0, 5.0, 9.0]}) == {
        "LengthPoolSortDataset": 4.0
    }


def count_encodes_between_emissions(read_ahead: bool) -> list[int]:
    """Encodes before each emitted sample of a stream of 30 in pools of 10."""
    config = common.single_worker()
    num_encoded = 0

    def encode() -> None:
        nonlocal num_encoded
        num_encoded += 1

    stream = common.SyntheticStream(lengths(30).tolist(), encode=encode, worker_config=config)
    wrapper = LengthPoolSortDataset if read_ahead else pool_stall.CollectThenEmit
    counts = [0]
    with common.active_worker(config):
        for _ in wrapper(stream, pool_size=10, worker_config=config):
            counts.append(num_encoded)
    return np.diff(counts).tolist()


def test_the_plain_algorithm_stalls_and_read_ahead_does_not() -> None:
    assert count_encodes_between_emissions(read_ahead=False) == ([10] + [0] * 9) * 3
    first, *rest = count_encodes_between_emissions(read_ahead=True)
    assert first == 11
    assert max(rest) == 1


def test_both_algorithms_of_the_stall_benchmark_emit_one_order() -> None:
    tokens, config = lengths(45).tolist(), common.single_worker()
    orders = []
    for wrapper in (LengthPoolSortDataset, pool_stall.CollectThenEmit):
        stream = common.SyntheticStream(tokens, worker_config=config)
        with common.active_worker(config):
            orders.append([sample.__key__ for sample in wrapper(stream, pool_size=10, worker_config=config)])
    assert orders[0] == orders[1]


def test_stall_measurement_counts_gaps_without_the_last_pool() -> None:
    config = common.single_worker()
    first, gaps = pool_stall.emission_gaps(common.SyntheticStream([1] * 10, worker_config=config), num_samples=6)
    assert first >= 0
    assert gaps.shape == (5,)
    for every in (0, 5):
        result = pool_stall.measure([1] * 30, pool_size=10, encode_s=1e-5, read_ahead=True, collect_every=every)
        assert result["largest_ms"] >= result["median_ms"] > 0
        groups = pool_stall.measure_groups([1000] * 60, buffer_size=20, encode_s=1e-5, collect_every=every)
        assert groups["largest_ms"] >= groups["median_ms"] > 0


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (step_efficiency, ["--ranks", "2", "--pools", "8"]),
        (worker_dilution, ["--workers", "2", "--pool-size", "20", "--pools-per-worker", "2"]),
        (wrapper_overhead, ["--pool-size", "8", "--num-samples", "40", "--repeats", "1"]),
        (pool_stall, ["--pool-size", "8", "--num-pools", "2", "--encode-ms", "0.01", "--repeats", "1"]),
    ],
)
def test_scripts_print_a_table_and_write_json(tmp_path: Path, script: object, arguments: list[str]) -> None:
    output = tmp_path / "out.json"
    result = CliRunner().invoke(script.main, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "lengths: " in result.output
    assert json.loads(output.read_text())["rows"]
    assert "Claim:" in CliRunner().invoke(script.main, ["--help"]).output
