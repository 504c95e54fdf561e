"""Simulated steps are those of the levers themselves, and their figures are right where the answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiak_ext.analysis.balanced import BalanceSettings, balanced_schedule
from aiak_ext.analysis.memory import MemoryModel
from aiak_ext.analysis.model_dims import DEFAULT_DIMS, ModelDims, TransformerDims
from aiak_ext.analysis.read_energon import ReadPlan, read_dataset
from aiak_ext.analysis.read_tables import read_lengths_file
from aiak_ext.analysis.samples import SampleTable
from aiak_ext.analysis.schedule import Schedule, measure, micro_batch_sizes
from aiak_ext.analysis.simulate import Setting, default_steps, pool_rule, simulate
from aiak_ext.analysis.streams import DealtStreams, ReadStreams
from data_balance import CostModel, SampleCostModel
from data_balance.options import DEFAULT_COST_MODEL
from length_sort.rounds import RoundRules
from tests.energon_data import (
    NumberTaskEncoder,
    SortedNumberTaskEncoder,
    lognormal_lengths,
    sorted_pools,
    train_dataset,
    write_dataset,
)

#: The standing benchmark's lengths, beside the project on some machines only.
MIX_CSV = Path(__file__).resolve().parents[3] / "shared" / "data" / "lengths" / "mix_vlm_sft.csv"
LINEAR = SampleCostModel(vision=CostModel(1.0, 0.0), language=CostModel(1.0, 0.0))
MEMORY = MemoryModel(dims=DEFAULT_DIMS, data_parallel=64)


def table_of(tokens: list[int], patches: list[int] | None = None) -> SampleTable:
    return SampleTable(
        source="test",
        num_tokens=np.array(tokens, dtype=np.int64),
        num_patches=np.array(patches if patches is not None else [0] * len(tokens), dtype=np.int64),
    )


def random_table(count: int = 2000, seed: int = 0) -> SampleTable:
    rng = np.random.default_rng(seed)
    return table_of((rng.lognormal(5, 1, count).astype(int) + 1).tolist(), rng.integers(0, 400, count).tolist())


def figures_of(setting: Setting, table: SampleTable | None = None, num_steps: int | None = None):
    return simulate(table or random_table(), setting, LINEAR, MEMORY, num_steps=num_steps).figures


def test_figures_of_known_steps() -> None:
    # Two ranks, one step of two micro batches of two samples each.
    table = table_of([10, 30, 20, 20, 40, 40, 10, 10], [0, 8, 0, 0, 0, 0, 0, 0])
    order = np.arange(8).reshape(2, 4)
    schedule = Schedule.from_order(order, num_slots=2, micro_batch_size=2)
    tokens, patches = micro_batch_sizes(schedule, table)
    assert tokens.tolist() == [[[60, 40], [80, 20]]]
    assert patches.tolist() == [[[8, 0], [0, 0]]]
    figures = measure(schedule, table, LINEAR, MEMORY)
    assert figures.efficiency == pytest.approx((108 + 100) / 2 / 108)
    assert figures.padding == pytest.approx(1 - 180 / 200)
    assert figures.useful == pytest.approx(188 / 2 / 108)
    assert figures.largest_micro_batch == 80
    each = measure(schedule, table, LINEAR, MEMORY, micro_batch_sync=True)
    assert each.efficiency == pytest.approx(104 / (80 + 40))
    halves = measure(replace(schedule, encoder_balanced=True), table, LINEAR, MEMORY)
    assert halves.efficiency == pytest.approx(104 / (80 + 8 + 40))
    packed = measure(replace(schedule, padded=False), table, LINEAR, MEMORY)
    assert packed.padding == 0 and packed.efficiency == pytest.approx(94 / 100)


def test_too_few_samples_for_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="a rank has 3 samples and a step takes 4"):
        Schedule.from_order(np.zeros((2, 3), dtype=np.int64), num_slots=2, micro_batch_size=2)


def test_dealt_streams_hold_every_sample_once_per_pass() -> None:
    streams = DealtStreams(table_of([1] * 10))
    taken = np.concatenate([streams.take(0, 0, 4), streams.take(1, 0, 6), streams.take(0, 0, 10)])
    assert sorted(taken[:10]) == list(range(10)) == sorted(taken[10:])
    with pytest.raises(ValueError, match="was not read as 2 ranks x 1 workers"):
        ReadStreams(table_of([1]), 2, 1)


@pytest.mark.parametrize("shuffle_block", [1, 2])
def test_simulated_batches_are_those_that_the_pipeline_emits(tmp_path: Path, shuffle_block: int) -> None:
    """Read, order and cut as a run of 2 ranks does: padding and step efficiency are then exact."""
    path = write_dataset(tmp_path / "data", lognormal_lengths(64))
    plan = ReadPlan(num_ranks=2, num_workers=1, num_samples=64, repeat=True)
    table = read_dataset(path, NumberTaskEncoder(), plan)
    config = sorted_pools(16, micro_batch_size=2, shuffle_block=shuffle_block)
    emitted = []
    for rank in range(2):
        dataset = train_dataset(
            path, SortedNumberTaskEncoder(config), rank=rank, world_size=2, num_workers=1, batch_size=2
        )
        dataset.worker_config.worker_activate(0)
        emitted.append([batch.lengths for _, batch in zip(range(16), dataset)])
        dataset.worker_config.worker_deactivate()
    batches = np.array(emitted)  # [ranks, steps, micro batch]
    setting = Setting(num_ranks=2, micro_batch_size=2, pool=pool_rule(16, shuffle_block))
    figures = simulate(table, setting, LINEAR, MEMORY, num_steps=16, as_read=True).figures
    longest = batches.max(axis=2)
    assert figures.num_steps == 16
    assert figures.padding == pytest.approx(1 - batches.sum() / (2 * longest.sum()))
    assert figures.efficiency == pytest.approx(longest.mean(axis=0).sum() / longest.max(axis=0).sum())


def test_workers_take_turns_and_keep_pools_of_their_own() -> None:
    table = random_table()
    one = figures_of(Setting(num_ranks=8, num_workers=1, pool=pool_rule(256, 1)), table, 512)
    four = figures_of(Setting(num_ranks=8, num_workers=4, pool=pool_rule(256, 1)), table, 512)
    assert four.efficiency == pytest.approx(one.efficiency, abs=0.04)
    assert one.samples_per_step == four.samples_per_step == 8


def test_levers_raise_useful_time_in_their_ways() -> None:
    plain = Setting(num_ranks=8, micro_batch_size=4)
    none = figures_of(plain, num_steps=200)
    sample_shuffle = figures_of(replace(plain, pool=pool_rule(400, 1)), num_steps=200)
    blocks = figures_of(replace(plain, pool=pool_rule(400, 4)), num_steps=200)
    assert none.efficiency + 0.1 < sample_shuffle.efficiency
    assert blocks.padding < 0.05 < 0.3 < sample_shuffle.padding
    assert none.useful < sample_shuffle.useful < blocks.useful < 1
    assert none.waiting == pytest.approx(1 - none.efficiency)


def test_order_by_cost_matches_ranks_that_length_leaves_apart() -> None:
    """Samples of one length with and without images: only their cost tells them apart."""
    table = random_table()
    table = table_of(np.full(2000, 100).tolist(), (table.num_patches * 10).tolist())
    rules = RoundRules(token_budget=100, policy="packed", target="min", buffer_size=256)
    for lever in ({"pool": pool_rule(256, 1)}, {"odb": rules}):
        by_length = figures_of(Setting(num_ranks=8, **lever), table, 200)
        by_cost = figures_of(Setting(num_ranks=8, order_by="cost", **lever), table, 200)
        assert by_length.efficiency < 0.8 < 0.93 < by_cost.efficiency
    with pytest.raises(ValueError, match="order_by 'size' is unknown"):
        Setting(num_ranks=8, order_by="size")


@pytest.mark.parametrize("policy", ["carry_over", "tight", "packed"])
def test_odb_groups_keep_the_budget_and_the_ranks_in_step(policy: str) -> None:
    rules = RoundRules(token_budget=2048, buffer_size=128, policy=policy, target="min")
    table = random_table()
    table = SampleTable(source="test", num_tokens=np.minimum(table.num_tokens, 2048))
    figures = figures_of(Setting(num_ranks=4, num_workers=2, odb=rules, num_microbatches=2), table, 40)
    assert figures.num_steps == 40
    assert figures.largest_micro_batch <= 2048
    assert figures.efficiency > 0.85
    assert figures.padding == 0 if policy == "packed" else 0 < figures.padding < 0.2


def test_step_balance_ends_waiting_and_loses_no_sample() -> None:
    table, plain = random_table(), Setting(num_ranks=4, micro_batch_size=2, num_microbatches=4)
    before = figures_of(plain, table, 10)
    result = simulate(table, replace(plain, balance=BalanceSettings()), LINEAR, MEMORY, num_steps=10)
    assert result.figures.useful > before.useful + 0.1
    assert result.figures.samples_per_step == before.samples_per_step
    assert result.moved_share is not None and 0 < result.moved_share < 1
    assert result.setting.lever == "balance_step"
    row = result.row()
    assert row["detail"] == "lpt" and row["ranks"] == 4


def test_one_sample_per_rank_leaves_nothing_to_move() -> None:
    setting = Setting(num_ranks=4, balance=BalanceSettings())
    result = simulate(random_table(), setting, LINEAR, MEMORY, num_steps=10)
    assert result.moved_share == 0


def test_encoder_balance_moves_images_only() -> None:
    table = table_of([10] * 8, [100, 100, 0, 0, 0, 0, 0, 0])
    schedule = Schedule.from_order(np.arange(8).reshape(4, 2), num_slots=1, micro_batch_size=2)
    moved, share = balanced_schedule(schedule, table, LINEAR, BalanceSettings(scope="encoder"))
    assert moved.rank.tolist() == schedule.rank.tolist()
    assert sorted(np.bincount(moved.vision_rank[:2], minlength=4)) == [0, 0, 1, 1]
    assert share == pytest.approx(0.5)
    before, after = (measure(one, table, LINEAR, MEMORY) for one in (schedule, moved))
    assert before.efficiency == pytest.approx(70 / 220)
    assert after.efficiency == pytest.approx(70 / 120)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 500), min_size=12, max_size=60),
    st.integers(2, 4),
    st.integers(1, 3),
    st.sampled_from(["step", "encoder"]),
)
def test_balance_keeps_every_sample_in_its_step(tokens: list[int], ranks: int, slots: int, scope: str) -> None:
    table = table_of(tokens, [token * 3 % 50 for token in tokens])
    num = len(tokens) // (ranks * slots * 1)
    if num == 0:
        return
    order = np.arange(ranks * slots * num).reshape(ranks, -1)
    schedule = Schedule.from_order(order, slots, 1)
    moved, _ = balanced_schedule(schedule, table, LINEAR, BalanceSettings(scope=scope, threshold=0.0))
    assert moved.sample.tolist() == schedule.sample.tolist()
    assert moved.step.tolist() == schedule.step.tolist()
    before, after = (measure(one, table, LINEAR, MEMORY) for one in (schedule, moved))
    if scope == "step":
        assert after.efficiency >= before.efficiency - 1e-9


def test_settings_that_make_no_run_are_refused() -> None:
    with pytest.raises(ValueError, match="one rank waits for nobody"):
        Setting(num_ranks=1)
    with pytest.raises(ValueError, match="length sort together with ODB"):
        Setting(num_ranks=2, pool=pool_rule(8, 1), odb=RoundRules(token_budget=10))
    with pytest.raises(ValueError, match="'none' does not exist"):
        BalanceSettings(algorithm="none")
    with pytest.raises(ValueError, match="scope 'rank' is unknown"):
        BalanceSettings(scope="rank")
    assert pool_rule(10, 4).pool_size == 12
    assert default_steps(Setting(num_ranks=2)) > default_steps(Setting(num_ranks=8192)) == 64


def test_default_dimensions_are_those_of_the_default_cost_model() -> None:
    assert DEFAULT_DIMS.cost_model() == DEFAULT_COST_MODEL
    # LLaVA-OneVision-1.5-4B: 4.0e9 with one embedding matrix (tied), 0.3e9 of them in the ViT.
    tied = DEFAULT_DIMS.num_parameters() - 151936 * 2560
    assert tied == pytest.approx(4.3e9, rel=0.03)


def test_memory_of_a_known_layer() -> None:
    dims = ModelDims(language=TransformerDims(hidden_size=8, ffn_hidden_size=16, num_layers=2, num_attention_heads=2))
    memory = MemoryModel(dims=dims)
    # Per token and layer: 2 bytes x (4 x 8 norms + 2 x 8 query, output + 2 x 8 key, value + 2 x 16 MLP) + 4 x 2 heads.
    assert memory.activation_bytes(1, 0) == 2 * (2 * (32 + 16 + 16 + 32) + 8)
    assert replace(memory, recompute="full").activation_bytes(1, 0) == 2 * 16 + 200
    assert replace(memory, tensor_parallel=2).activation_bytes(10, 5) == 2000
    parameters = 2 * (4 * 64 + 2 * 8 * 16)
    assert memory.state_bytes() == parameters * 18
    assert replace(memory, data_parallel=4).state_bytes() == parameters * 9
    budget = memory.largest_token_budget(100_000.0)
    assert memory.fits(memory.step_bytes(budget, 0), 100_000.0)
    assert not memory.fits(memory.step_bytes(budget + 1, 0), 100_000.0)
    assert memory.largest_token_budget(10.0) == 0
    with pytest.raises(ValueError, match="recompute 'some'"):
        MemoryModel(dims=dims, recompute="some")


def test_dimensions_from_the_data_balance_model_config(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(
        '{"image_encoder": {"tp": 1, "vision_encoder": {"hidden_size": 8, "ffn_hidden_size": 16, "num_layers": 1}},'
        ' "text_decoder": {"hidden_size": 4, "ffn_hidden_size": 8, "num_layers": 3, "vocab_size": 10}}'
    )
    dims = ModelDims.from_json(path)
    assert dims.vision is not None and dims.vision.hidden_size == 8
    assert dims.language.num_parameters() == 3 * (4 * 16 + 2 * 4 * 8) + 2 * 4 * 10
    path.write_text('{"image_encoder": {}}')
    with pytest.raises(ValueError, match="no text_decoder"):
        ModelDims.from_json(path)


@pytest.mark.skipif(not MIX_CSV.exists(), reason="mix_vlm_sft.csv is not beside the project")
def test_the_standing_benchmarks_figures_come_out() -> None:
    """Design section 11: cost 6 x 2560 n + n^2, 64 ranks."""
    table = read_lengths_file(MIX_CSV)
    costs = SampleCostModel(vision=CostModel(1e-30, 0.0), language=CostModel(6 * 2560.0, 1.0))

    def efficiency(steps: int, **levers) -> float:
        setting = Setting(num_ranks=64, **levers)
        return simulate(table, setting, costs, MEMORY, num_steps=steps).figures.efficiency

    assert efficiency(1000) == pytest.approx(0.23, abs=0.01)
    assert efficiency(1000, pool=pool_rule(1000, 1)) == pytest.approx(0.89, abs=0.02)
    assert efficiency(1000, pool=pool_rule(4000, 1)) == pytest.approx(0.94, abs=0.02)
    rules = RoundRules(token_budget=8192, policy="packed", target="min")
    assert efficiency(80, odb=rules) == pytest.approx(0.987, abs=0.01)
    padded = Setting(num_ranks=8, micro_batch_size=4)
    assert simulate(table, padded, costs, MEMORY, num_steps=500).figures.padding == pytest.approx(0.51, abs=0.02)
    blocks = replace(padded, pool=pool_rule(1000, 4))
    assert simulate(table, blocks, costs, MEMORY, num_steps=500).figures.padding <= 0.012
