"""The rows of the demo's table: which levers each run has. A new lever is one entry here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MICRO_BATCH_SIZE = 4
# Four samples of the demo data on average, as a micro batch has: ODB then takes about as many steps as other rows.
TOKEN_BUDGET = 736
# Beside a row's metrics: its loss on held-out samples after the run.
FINAL_LOSS_FILE = "final_loss.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run with certain levers; everything else is the same in all rows."""

    name: str
    """Its key in summary.json."""
    flags: tuple[str, ...] = ()
    """What distinguishes it from a run without levers."""


def demo_rows(num_samples: int, num_ranks: int, only: Sequence[str] = ()) -> list[Row]:
    """The rows for runs of `num_samples` samples over `num_ranks` ranks; those named in `only`, or all.

    A pool is as large as a rank's share of the run, so that every row trains the same samples. With data for hours
    one would take thousands.

    Raises:
        ValueError: A name that no row has, or too few samples for a measurement.
    """
    pool_size = num_samples // num_ranks
    if pool_size < 2 * MICRO_BATCH_SIZE:
        raise ValueError(
            f"{num_samples} samples are fewer than two steps of {num_ranks} ranks x {MICRO_BATCH_SIZE}, and the first "
            f"step is not timed, so nothing could be compared. Use {2 * num_ranks * MICRO_BATCH_SIZE} or more."
        )
    length_sort = ("--length-sort-pool-size", str(pool_size))
    odb = ("--odb-token-budget", str(TOKEN_BUDGET), "--odb-policy", "packed", "--odb-target", "min")
    odb += ("--odb-buffer-size", str(pool_size))
    rows = [
        Row(name="none"),
        Row(name="length_sort", flags=length_sort),
        Row(name="odb", flags=odb),
        Row(name="balance_step", flags=("--use-data-balance", "--data-balance-sorting-algo", "lpt")),
        Row(
            name="balance_encoder",
            flags=("--use-data-balance", "--data-balance-sorting-algo", "lpt", "--data-balance-scope", "encoder"),
        ),
        Row(
            name="length_sort+balance_step",
            flags=(*length_sort, "--use-data-balance", "--data-balance-sorting-algo", "lpt"),
        ),
    ]
    unknown = sorted(set(only) - {row.name for row in rows})
    if unknown:
        raise ValueError(
            f"There is no row {', '.join(unknown)}, so it cannot be run. Choose from {[r.name for r in rows]}."
        )
    return [row for row in rows if not only or row.name in only]
