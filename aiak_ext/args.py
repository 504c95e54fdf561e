"""Command-line flags made from the config dataclasses, and what Megatron's arguments need from the levers."""

from __future__ import annotations

import argparse
from typing import Any

from aiak_ext.config import ExtensionConfig
from aiak_ext.lever_configs import DataBalanceConfig, LengthSortConfig, ODBConfig
from aiak_ext.options import Option, options_of

# Title of the argument group -> the dataclass that declares its flags.
_GROUPS: dict[str, type] = {
    "length-sorted pools": LengthSortConfig,
    "online dynamic batching": ODBConfig,
    "data balance": DataBalanceConfig,
    "data loading": ExtensionConfig,
}


def add_extension_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the extension's flags; a Megatron ``extra_args_provider``.

    A flag that the parser already has (LLaVA-OneVision-2's ``--length-sort-pool-size``, MindSpeed's
    ``--use-data-balance``) is adopted with the host's default. Where the host has the same setting under
    another spelling (MindSpeed's ``--data_balance_sorting_algo``), ours is added as a second name for it.

    Args:
        parser: The host's parser, which already holds the host's own options.

    Returns:
        The same parser.

    Raises:
        ValueError: When the host has one of our flags but stores it under another name.
    """
    for title, config in _GROUPS.items():
        group = parser.add_argument_group(title)
        for _, declared in options_of(config):
            # argparse has no public way to ask which options exist, and conflict_handler="resolve" would
            # drop the host's.
            same_flag = [action for action in parser._actions if declared.flag in action.option_strings]
            same_dest = [action for action in parser._actions if action.dest == declared.dest]
            if not same_flag:
                _add_flag(group, declared, default=argparse.SUPPRESS if same_dest else declared.default)
            elif not same_dest:
                raise ValueError(
                    f"the host's parser stores {declared.flag} as {same_flag[0].dest!r}, so the extension, "
                    f"which reads {declared.dest!r}, would never see it; change the host's dest"
                )
    return parser


def _add_flag(group: Any, declared: Option, default: Any) -> None:
    if declared.parse is bool:
        group.add_argument(declared.flag, action="store_true", default=default, help=declared.help)
    else:
        group.add_argument(
            declared.flag,
            type=declared.parse,
            choices=declared.choices,
            default=default,
            help=declared.help,
        )


def apply_to_megatron_args(args: Any, config: ExtensionConfig) -> None:
    """Set what the levers need in Megatron's arguments. Call it after Megatron's ``validate_args``.

    Micro batches of different shapes need ``variable_seq_lengths``: pipeline stages then tell each other the
    shape before they send the tensor, and without it they wait for one another for ever. Megatron has no
    flag for it and ``validate_args`` switches it off. It is set for every lever that forms micro batches by
    length: length sort, ODB, and data balance in step scope (encoder scope leaves micro batches as they are).
    Megatron core then also refuses the all-gather MoE dispatcher, which cannot mix sequence lengths.

    Args:
        args: Megatron's namespace; ``args.variable_seq_lengths`` is set in place.
        config: The extension's settings.
    """
    balances_steps = config.data_balance.active and config.data_balance.scope == "step"
    if config.length_sort.active or config.odb.active or balances_steps:
        args.variable_seq_lengths = True


def flag_table() -> str:
    """Return all flags as a Markdown table (flag, default, meaning), which the README holds a copy of."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for config in _GROUPS.values():
        for _, declared in options_of(config):
            if declared.default is None or declared.default is False:
                default = "off" if declared.default is False else "none"
            else:
                default = f"`{declared.default}`"
            choices = f" ({', '.join(f'`{choice}`' for choice in declared.choices)})" if declared.choices else ""
            rows.append(f"| `{declared.flag}` | {default} | {declared.help}{choices} |")
    return "\n".join(rows)
