"""Declares a config field together with its command-line flag, help and limits.

The flags, their defaults and the checks of the config dataclasses all come from these declarations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What one field of a config says about its flag and its allowed values.

    Attributes:
        flag: Long option, e.g. ``--odb-buffer-size``.
        help: Help text of the flag.
        default: Default of the field and of the flag.
        parse: Turns the flag's text into the value; `bool` makes a switch without a value.
        optional: Whether None is a value.
        choices: The only values allowed, None for any.
        minimum: Smallest value allowed, None for any.
        below: What a smaller value would mean, completing "is N, which ...".
    """

    flag: str
    help: str
    default: Any
    parse: Callable[[str], Any]
    optional: bool
    choices: tuple[str, ...] | None
    minimum: float | None
    below: str

    @property
    def dest(self) -> str:
        """The attribute that argparse stores the flag under."""
        return self.flag.removeprefix("--").replace("-", "_")


def int_or_none(text: str) -> int | None:
    """Parse an integer, or the word ``none``."""
    return None if text.lower() == "none" else int(text)


def option(
    default: T,
    flag: str,
    help: str,
    *,
    parse: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    below: str = "",
) -> T:
    """Declare a dataclass field with its `Option`.

    The arguments are the attributes of `Option`. `parse` is the default's type when not given; a field whose
    default is None, or that is parsed by `int_or_none`, may be None. The return type is the field's, as with
    `dataclasses.field`.
    """
    declared = Option(
        flag=flag,
        help=help,
        default=default,
        parse=parse or type(default),
        optional=default is None or parse is int_or_none,
        choices=choices,
        minimum=minimum,
        below=below,
    )
    return field(default=default, metadata={"option": declared})


def options_of(config: Any) -> Iterator[tuple[str, Option]]:
    """Yield (field name, Option) for the fields of a config class or instance that have a flag."""
    for config_field in dataclasses.fields(config):
        if "option" in config_field.metadata:
            yield config_field.name, config_field.metadata["option"]


def check_options(config: Any) -> None:
    """Check every field of a config instance against its `Option`.

    Raises:
        ValueError: Naming the field, its flag, the value, what is wrong with it and what to give.
    """
    for name, declared in options_of(config):
        value = getattr(config, name)
        if value is None and declared.optional:
            continue
        where = f"{type(config).__name__}.{name} ({declared.flag}) is {value!r}"
        if declared.choices is not None and value not in declared.choices:
            raise ValueError(f"{where}, which is unknown; choose one of {', '.join(declared.choices)}")
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if declared.parse in (int, int_or_none) and not is_int:
            raise ValueError(f"{where}, which is not an integer; give a whole number")
        # "not >=" instead of "<", so that NaN is refused as well.
        if declared.minimum is not None and not value >= declared.minimum:
            raise ValueError(f"{where}, which {declared.below}; give at least {declared.minimum}")
