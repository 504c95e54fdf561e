"""ExtensionConfig: the levers' settings together, checked against each other and against the host's run."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

from aiak_ext.lever_configs import DataBalanceConfig, LengthSortConfig, ODBConfig, round_up
from aiak_ext.options import check_options, option, options_of

__all__ = ["DataBalanceConfig", "ExtensionConfig", "LengthSortConfig", "ODBConfig"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExtensionConfig:
    """All settings of the extension, with the few facts about the host's run that they depend on.

    Works without argparse, e.g.
    ``ExtensionConfig(length_sort=LengthSortConfig(pool_size=1000), micro_batch_size=4)``.

    Attributes:
        length_sort: Length-sorted pools. A `shuffle_block` of 0 is replaced by `micro_batch_size` here.
        odb: Token-budget groups.
        data_balance: Balance across ranks.
        restart_data: Ignore the saved loader state and start the data over.
        dataloader_save: Directory for the loader state of every data-parallel rank.
        micro_batch_size: Samples per micro batch.
        calculate_per_token_loss: Whether the host divides summed token losses by the step's global tokens.
        train_samples: The host's training length in samples, None when it counts iterations.

    Raises:
        ValueError: For levers or settings that do not combine.
    """

    length_sort: LengthSortConfig = field(default_factory=LengthSortConfig)
    odb: ODBConfig = field(default_factory=ODBConfig)
    data_balance: DataBalanceConfig = field(default_factory=DataBalanceConfig)
    restart_data: bool = option(
        False,
        "--restart-data",
        "ignore the saved loader state and start the data over",
    )
    dataloader_save: str | None = option(
        None,
        "--dataloader-save",
        "directory for the loader state; Megatron saves the loader only when this is given",
        parse=str,
    )
    micro_batch_size: int = 1
    calculate_per_token_loss: bool = False
    train_samples: int | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.micro_batch_size < 1:
            raise ValueError(
                f"micro_batch_size is {self.micro_batch_size}, which leaves batches empty; give at least 1"
            )
        if self.length_sort.shuffle_block == 0:
            # replace() runs LengthSortConfig's own checks again, now with the block that will be used.
            resolved = dataclasses.replace(self.length_sort, shuffle_block=self.micro_batch_size)
            object.__setattr__(self, "length_sort", resolved)
        _check_combinations(self)

    @classmethod
    def from_args(cls, args: Any) -> ExtensionConfig:
        """Build the settings from parsed arguments.

        Args:
            args: Namespace of a parser that went through `add_extension_args`. Options that it lacks, or
                holds as None, take their defaults; so do Megatron's own fields.

        Returns:
            The checked settings. A pool size that is no multiple of the shuffle block is rounded up, with a
            warning.

        Raises:
            ValueError: As the class does.
        """
        micro_batch_size = getattr(args, "micro_batch_size", None) or 1
        return cls(
            length_sort=LengthSortConfig(**_length_sort_fields(args, micro_batch_size)),
            odb=ODBConfig(**_fields_from(args, ODBConfig)),
            data_balance=DataBalanceConfig(**_fields_from(args, DataBalanceConfig)),
            micro_batch_size=micro_batch_size,
            calculate_per_token_loss=bool(getattr(args, "calculate_per_token_loss", False)),
            train_samples=getattr(args, "train_samples", None),
            **_fields_from(args, cls),
        )


def _fields_from(args: Any, config: type) -> dict[str, Any]:
    """Return the fields of a config class that `args` has a value for.

    A host may hold an option of its own as None where ours never is: None is a value for optional ones only.
    """
    fields = {}
    for name, declared in options_of(config):
        value = getattr(args, declared.dest, declared.default)
        if value is not None or declared.optional:
            fields[name] = value
    return fields


def _length_sort_fields(args: Any, micro_batch_size: int) -> dict[str, Any]:
    """Return the length sort's fields from `args`, the pool size rounded up to whole shuffle blocks."""
    fields = _fields_from(args, LengthSortConfig)
    asked = fields["pool_size"]
    block = fields["shuffle_block"] or micro_batch_size
    if asked > 0 and block > 0 and asked % block:
        fields["pool_size"] = round_up(asked, block)
        if getattr(args, "rank", 0) == 0:
            logger.warning(
                "--length-sort-pool-size %d is not a multiple of the shuffle block %d; using %d",
                asked,
                block,
                fields["pool_size"],
            )
    return fields


def _check_combinations(config: ExtensionConfig) -> None:
    """Raise ValueError for levers and host settings that exclude each other."""
    length_sort, odb, data_balance = config.length_sort, config.odb, config.data_balance
    if length_sort.active and odb.active:
        raise ValueError(
            f"--length-sort-pool-size {length_sort.pool_size} together with --odb-token-budget "
            f"{odb.token_budget}: ODB groups its own buffer by length and undoes the pool's order, so "
            "the pool would only cost memory and delay; set one of the two to 0"
        )
    if odb.active and not config.calculate_per_token_loss:
        raise ValueError(
            f"--odb-token-budget {odb.token_budget} without --calculate-per-token-loss: groups hold "
            "different numbers of tokens, so the mean of the ranks' means is a biased loss; add "
            "--calculate-per-token-loss"
        )
    if odb.active and config.train_samples:
        raise ValueError(
            f"--odb-token-budget {odb.token_budget} with --train-samples {config.train_samples}: Megatron "
            "counts micro batch size x data-parallel size samples per step, not what groups hold, so "
            "the run would end and decay its learning rate at the wrong sample; use --train-iters"
        )
    if data_balance.active and data_balance.scope == "step" and not config.calculate_per_token_loss:
        raise ValueError(
            "--use-data-balance in scope 'step' without --calculate-per-token-loss: samples change ranks, so "
            "the mean of the ranks' means has another gradient than the unbalanced run; add "
            "--calculate-per-token-loss or use --data-balance-scope encoder"
        )
