"""Reads the arguments of a planned run from a JSON or YAML file, or from the flags of a command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from aiak_ext.args import add_extension_args
from aiak_ext.config import DataBalanceConfig, ExtensionConfig, LengthSortConfig, ODBConfig
from aiak_ext.options import options_of

# Megatron's own arguments that the checks read: flag -> type (bool is a switch).
_HOST_FLAGS: dict[str, type] = {
    "--micro-batch-size": int,
    "--global-batch-size": int,
    "--num-workers": int,
    "--seq-length": int,
    "--tensor-model-parallel-size": int,
    "--pipeline-model-parallel-size": int,
    "--context-parallel-size": int,
    "--train-samples": int,
    "--world-size": int,
    "--calculate-per-token-loss": bool,
    "--variable-seq-lengths": bool,
}


def settings_from_flags(flags: Sequence[str]) -> argparse.Namespace:
    """The run's arguments from a command line; flags that no check reads are left alone.

    Raises:
        ValueError: a value that its flag does not take.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for flag, kind in _HOST_FLAGS.items():
        if kind is bool:
            # Absent is not the same as off: hosts may set it in their model config.
            parser.add_argument(flag, action="store_true", default=None)
        else:
            parser.add_argument(flag, type=kind, default=None)
    add_extension_args(parser)
    return parser.parse_known_args(list(flags))[0]


def settings_from_file(path: str | Path) -> argparse.Namespace:
    """The run's arguments from a file of names and values; names are flags with or without dashes.

    Raises:
        ValueError: the file holds no such mapping, or a name looks like one of the levers' but is none.
    """
    file = Path(path)
    text = file.read_text(encoding="utf-8")
    try:
        content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be parsed ({error}); give JSON (.json) or YAML") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no names and values; write one argument per line, e.g. micro-batch-size: 4")
    args = settings_from_flags([])
    known = {declared.dest for config in _CONFIGS for _, declared in options_of(config)}
    for name, value in content.items():
        dest = str(name).lstrip("-").replace("-", "_")
        if dest.startswith(("length_sort_", "odb_", "data_balance_")) and dest not in known:
            raise ValueError(f"{file} sets {name}, which no lever has, so it would have no effect; correct the name")
        setattr(args, dest, value)
    return args


_CONFIGS: tuple[Any, ...] = (LengthSortConfig, ODBConfig, DataBalanceConfig, ExtensionConfig)


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process."""

    def error(self, message: str) -> Any:
        raise ValueError(f"the flags cannot be parsed: {message}; correct them")
