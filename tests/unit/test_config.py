"""The config dataclasses: limits, cross checks, and settings built from a parsed namespace."""

from __future__ import annotations

import argparse
import dataclasses
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiak_ext.config import DataBalanceConfig, ExtensionConfig, LengthSortConfig, ODBConfig


def namespace(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**values)


def test_defaults_are_off() -> None:
    config = ExtensionConfig()
    assert not config.length_sort.active
    assert not config.odb.active
    assert not config.data_balance.active
    assert ExtensionConfig.from_args(namespace()) == config


def test_configs_are_frozen_and_keyword_only() -> None:
    for config in (LengthSortConfig, ODBConfig, DataBalanceConfig, ExtensionConfig):
        with pytest.raises(TypeError):
            config(1)
        instance = config()
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, dataclasses.fields(config)[0].name, 1)


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        (LengthSortConfig, {"pool_size": -1}, ["--length-sort-pool-size", "-1", "at least 0"]),
        (LengthSortConfig, {"pool_size": 10.5}, ["--length-sort-pool-size", "10.5", "whole number"]),
        (LengthSortConfig, {"pool_size": True}, ["--length-sort-pool-size", "True", "whole number"]),
        (LengthSortConfig, {"pool_size": None}, ["--length-sort-pool-size", "None", "whole number"]),
        (LengthSortConfig, {"initial_pool_size": 0}, ["--length-sort-initial-pool-size", "at least 1"]),
        (LengthSortConfig, {"max_pool_bytes": -1}, ["--length-sort-max-pool-bytes", "at least 0"]),
        (LengthSortConfig, {"pool_size": 8, "initial_pool_size": 9}, ["9", "8", "at most the pool size"]),
        (LengthSortConfig, {"pool_size": 10, "shuffle_block": 4}, ["10", "block 4", "use 12"]),
        (ODBConfig, {"policy": "loose"}, ["--odb-policy", "'loose'", "carry_over, tight, packed"]),
        (ODBConfig, {"max_deferrals": -1}, ["--odb-max-deferrals", "at least 0"]),
        (ODBConfig, {"timeout_seconds": float("nan")}, ["--odb-timeout-seconds", "nan", "at least"]),
        (DataBalanceConfig, {"scope": "layer"}, ["--data-balance-scope", "step, encoder"]),
        (DataBalanceConfig, {"threshold": -0.1}, ["--data-balance-threshold", "-0.1", "at least 0.0"]),
        (ExtensionConfig, {"micro_batch_size": 0}, ["micro_batch_size", "0", "at least 1"]),
    ],
)
def test_bad_value_is_refused_with_value_and_remedy(config: type, values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        config(**values)
    for word in words:
        assert word in str(error.value)


def test_initial_pool_of_an_inactive_sort_is_not_checked() -> None:
    """LLaVA-OneVision-2 has an initial size of 10 also where the sort is off."""
    assert not LengthSortConfig(pool_size=0, initial_pool_size=10).active


def test_max_deferrals_none_is_a_value() -> None:
    assert ODBConfig(max_deferrals=None).max_deferrals is None


def test_shuffle_block_defaults_to_the_micro_batch_size() -> None:
    sort = LengthSortConfig(pool_size=100)
    assert ExtensionConfig(length_sort=sort).length_sort.shuffle_block == 1
    assert ExtensionConfig(length_sort=sort, micro_batch_size=4).length_sort.shuffle_block == 4
    own_block = LengthSortConfig(pool_size=100, shuffle_block=1)
    assert ExtensionConfig(length_sort=own_block, micro_batch_size=4).length_sort.shuffle_block == 1


def test_without_argparse_a_pool_of_broken_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pool size 10 .* block 4.*use 12"):
        ExtensionConfig(length_sort=LengthSortConfig(pool_size=10), micro_batch_size=4)


@given(pool_size=st.integers(0, 10_000), block=st.integers(0, 64), micro_batch_size=st.integers(1, 64))
def test_flags_round_the_pool_up_to_whole_blocks(pool_size: int, block: int, micro_batch_size: int) -> None:
    args = namespace(
        length_sort_pool_size=pool_size,
        length_sort_shuffle_block=block,
        micro_batch_size=micro_batch_size,
        rank=1,
    )
    sort = ExtensionConfig.from_args(args).length_sort
    assert sort.shuffle_block == (block or micro_batch_size)
    assert sort.pool_size % sort.shuffle_block == 0 or pool_size == 0
    assert pool_size <= sort.pool_size < pool_size + sort.shuffle_block


def test_rounding_is_logged_by_one_rank_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="aiak_ext.config"):
        ExtensionConfig.from_args(namespace(length_sort_pool_size=10, micro_batch_size=4, rank=3))
        assert not caplog.records
        ExtensionConfig.from_args(namespace(length_sort_pool_size=12, micro_batch_size=4, rank=0))
        assert not caplog.records
        ExtensionConfig.from_args(namespace(length_sort_pool_size=10, micro_batch_size=4, rank=0))
    assert [record.getMessage() for record in caplog.records] == [
        "--length-sort-pool-size 10 is not a multiple of the shuffle block 4; using 12"
    ]


def test_missing_and_none_fields_take_defaults() -> None:
    args = namespace(length_sort_pool_size=100, length_sort_seed=None, micro_batch_size=None)
    config = ExtensionConfig.from_args(args)
    assert config.micro_batch_size == 1
    assert config.length_sort.seed == 42
    assert config.length_sort.pool_size == 100


def test_from_args_reads_every_flag_and_fact() -> None:
    args = namespace(
        length_sort_desc=True,
        length_sort_warmup_steps=50,
        odb_max_deferrals=None,
        odb_max_patches=4096,
        data_balance_scope="encoder",
        use_data_balance=True,
        restart_data=True,
        dataloader_save="states",
        micro_batch_size=2,
        calculate_per_token_loss=True,
        train_samples=1000,
    )
    config = ExtensionConfig.from_args(args)
    assert config.length_sort.descending
    assert config.length_sort.warmup_pools == 50
    assert config.odb.max_deferrals is None
    assert config.odb.max_patches == 4096
    assert config.data_balance == DataBalanceConfig(enabled=True, scope="encoder")
    assert config.restart_data
    assert config.dataloader_save == "states"
    assert (config.micro_batch_size, config.calculate_per_token_loss, config.train_samples) == (2, True, 1000)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"length_sort": LengthSortConfig(pool_size=100), "odb": ODBConfig(token_budget=8192)},
            ["--length-sort-pool-size 100", "--odb-token-budget 8192", "set one of the two to 0"],
        ),
        (
            {"odb": ODBConfig(token_budget=8192)},
            ["8192", "biased loss", "add --calculate-per-token-loss"],
        ),
        (
            {"odb": ODBConfig(token_budget=8192), "calculate_per_token_loss": True, "train_samples": 1000},
            ["8192", "--train-samples 1000", "use --train-iters"],
        ),
        (
            {"data_balance": DataBalanceConfig(enabled=True, scope="step")},
            ["--use-data-balance", "another gradient", "--data-balance-scope encoder"],
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ExtensionConfig(**values)
    for word in words:
        assert word in str(error.value)


def test_combinations_that_work() -> None:
    balance = DataBalanceConfig(enabled=True)
    ExtensionConfig(length_sort=LengthSortConfig(pool_size=100), data_balance=balance, calculate_per_token_loss=True)
    ExtensionConfig(odb=ODBConfig(token_budget=100), data_balance=balance, calculate_per_token_loss=True)
    ExtensionConfig(data_balance=DataBalanceConfig(enabled=True, scope="encoder"))
    ExtensionConfig(length_sort=LengthSortConfig(pool_size=100), train_samples=1000)
