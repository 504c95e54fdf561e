"""Whether the levers accept their flags, one by one and together."""

from __future__ import annotations

import argparse
import dataclasses

from aiak_ext.analysis.findings import Finding, error, ok
from aiak_ext.config import ExtensionConfig, LengthSortConfig

_LEVERS = ("length_sort", "odb", "data_balance")


def check_settings(args: argparse.Namespace) -> tuple[list[Finding], ExtensionConfig | None]:
    """Whether the levers accept their flags: each alone, then all together.

    Returns:
        Findings, and the settings for the checks that follow: lenient ones, in which the levers that are wrong alone
        are off and the loss is per token, so that every other fault is found in the same call. None when nothing
        is left.
    """
    messages: dict[str, None] = {}
    for names in (*((name,) for name in _LEVERS), _LEVERS):
        try:
            ExtensionConfig.from_args(_with_levers(args, names))
        except ValueError as problem:
            messages[str(problem)] = None  # that of a single lever may come again with all of them together
    findings = [error("settings", *split_remedy(message)) for message in messages]
    if not findings:
        config = ExtensionConfig.from_args(_with_levers(args, _LEVERS))
        return [ok("settings", "the levers accept their flags and each other")], config
    lenient = argparse.Namespace(**vars(args))
    lenient.calculate_per_token_loss, lenient.train_samples = True, None
    for names in (_LEVERS, ("length_sort", "data_balance"), ("odb", "data_balance")):
        try:
            return findings, ExtensionConfig.from_args(_with_levers(lenient, names))
        except ValueError:
            continue
    return findings, None


def split_remedy(message: str) -> tuple[str, str]:
    """Message and remedy of one of our errors, which put the remedy behind the last semicolon."""
    what, separator, remedy = message.rpartition("; ")
    return (what, remedy) if separator else (message, "correct the value")


def _with_levers(args: argparse.Namespace, names: tuple[str, ...]) -> argparse.Namespace:
    """The arguments with every lever off that is not named."""
    changed = argparse.Namespace(**vars(args))
    changed.rank = None  # keeps `from_args`, which is called several times, from logging on "rank 0" each time
    if "length_sort" not in names:
        for field in dataclasses.fields(LengthSortConfig):
            option = field.metadata["option"]
            setattr(changed, option.dest, option.default)
    if "odb" not in names:
        changed.odb_token_budget = 0
    if "data_balance" not in names:
        changed.use_data_balance = False
    return changed
