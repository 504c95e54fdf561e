"""The flags: their list, their parsing, adoption of a host's own, and what Megatron's namespace gets."""

from __future__ import annotations

import argparse

import pytest

from aiak_ext.args import add_extension_args, apply_to_megatron_args, flag_table
from aiak_ext.config import DataBalanceConfig, ExtensionConfig, LengthSortConfig, ODBConfig

# The public surface: a flag that is added, renamed or removed must be so here as well, and in the CHANGELOG.
FLAGS = [
    "--length-sort-pool-size",
    "--length-sort-desc",
    "--length-sort-separate-packed",
    "--length-sort-warmup-steps",
    "--length-sort-initial-pool-size",
    "--length-sort-shuffle-block",
    "--length-sort-seed",
    "--length-sort-max-pool-bytes",
    "--length-sort-allow-inexact-resume",
    "--odb-token-budget",
    "--odb-buffer-size",
    "--odb-policy",
    "--odb-target",
    "--odb-group-order",
    "--odb-max-deferrals",
    "--odb-max-patches",
    "--odb-max-cost",
    "--odb-join-mode",
    "--odb-sync",
    "--odb-timeout-seconds",
    "--use-data-balance",
    "--data-balance-sorting-algo",
    "--data-balance-scope",
    "--data-balance-model-config",
    "--data-balance-threshold",
    "--data-balance-tolerance",
    "--data-balance-fit-steps",
    "--restart-data",
    "--dataloader-save",
]


def parse(parser: argparse.ArgumentParser, *words: str) -> ExtensionConfig:
    return ExtensionConfig.from_args(parser.parse_args(words))


def test_flag_list_is_pinned() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    assert add_extension_args(parser) is parser
    assert [flag for action in parser._actions for flag in action.option_strings] == FLAGS


def test_no_flags_parse_to_the_defaults() -> None:
    assert parse(add_extension_args(argparse.ArgumentParser())) == ExtensionConfig()


def test_every_kind_of_flag_parses() -> None:
    parser = add_extension_args(argparse.ArgumentParser())
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    sort = parse(parser, "--length-sort-pool-size", "1000", "--length-sort-desc", "--length-sort-seed", "7")
    assert sort.length_sort == LengthSortConfig(pool_size=1000, descending=True, seed=7, shuffle_block=1)
    odb = parse(
        parser,
        *("--odb-token-budget", "8192", "--odb-policy", "packed", "--odb-max-deferrals", "none"),
        *("--odb-max-cost", "1e9", "--odb-timeout-seconds", "60", "--calculate-per-token-loss"),
    )
    assert odb.odb == ODBConfig(
        token_budget=8192, policy="packed", max_deferrals=None, max_cost=1e9, timeout_seconds=60.0
    )
    balance = parse(parser, "--use-data-balance", "--data-balance-scope", "encoder")
    assert balance.data_balance == DataBalanceConfig(enabled=True, scope="encoder")


def test_an_unknown_choice_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(add_extension_args(argparse.ArgumentParser()), "--odb-policy", "loose")
    assert "carry_over" in capsys.readouterr().err


def test_help_renders() -> None:
    text = add_extension_args(argparse.ArgumentParser()).format_help()
    assert all(flag in text for flag in FLAGS)


def test_llava_onevision_2_options_are_adopted_with_their_defaults() -> None:
    host = argparse.ArgumentParser()
    host.add_argument("--length-sort-pool-size", type=int, default=0)
    host.add_argument("--length-sort-desc", action="store_true")
    host.add_argument("--length-sort-warmup-steps", type=int, default=50)
    host.add_argument("--length-sort-initial-pool-size", type=int, default=10)
    add_extension_args(host)
    assert parse(host).length_sort.warmup_pools == 50
    sort = parse(host, "--length-sort-pool-size", "500", "--length-sort-warmup-steps", "3").length_sort
    assert (sort.pool_size, sort.warmup_pools, sort.initial_pool_size) == (500, 3, 10)


def test_mindspeed_options_are_adopted_in_either_spelling() -> None:
    host = argparse.ArgumentParser()
    host.add_argument("--use-data-balance", action="store_true")
    host.add_argument("--data_balance_sorting_algo", default="post_global_balancing_greedy_without_pad")
    host.add_argument("--calculate-per-token-loss", action="store_true", default=True)
    add_extension_args(host)
    assert parse(host, "--use-data-balance").data_balance == DataBalanceConfig(enabled=True)
    for spelling in ("--data_balance_sorting_algo", "--data-balance-sorting-algo"):
        assert parse(host, "--use-data-balance", spelling, "lpt").data_balance.sorting_algo == "lpt"


def test_a_flag_stored_elsewhere_is_refused() -> None:
    host = argparse.ArgumentParser()
    host.add_argument("--dataloader-save", dest="loader_dir")
    with pytest.raises(ValueError, match=r"--dataloader-save as 'loader_dir'.*'dataloader_save'"):
        add_extension_args(host)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"length_sort": LengthSortConfig(pool_size=100)}, True),
        ({"odb": ODBConfig(token_budget=8192), "calculate_per_token_loss": True}, True),
        ({"data_balance": DataBalanceConfig(enabled=True), "calculate_per_token_loss": True}, True),
        ({"data_balance": DataBalanceConfig(enabled=True, scope="encoder")}, False),
    ],
)
def test_variable_seq_lengths_follows_the_levers(config: dict[str, object], expected: bool) -> None:
    args = argparse.Namespace(variable_seq_lengths=False)
    apply_to_megatron_args(args, ExtensionConfig(**config))
    assert args.variable_seq_lengths is expected


def test_a_hosts_own_variable_seq_lengths_stays_on() -> None:
    args = argparse.Namespace(variable_seq_lengths=True)
    apply_to_megatron_args(args, ExtensionConfig())
    assert args.variable_seq_lengths is True


def test_flag_table_has_one_row_per_flag() -> None:
    rows = flag_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == FLAGS
    assert all(row.count("|") == 4 for row in rows)
