"""Prediction beside reality: simulated before the run, implied by the run's own costs, measured by the clock."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiak_ext.reporting.run_figures import RunFigures


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of a run from three sources; None where a source does not know it."""

    name: str
    simulated: float | None
    """By `aiak-ext simulate` or `analyze`, from the data set."""
    from_costs: float | None
    """From the tokens and costs that the run recorded: exact, whatever the machine did."""
    measured: float | None
    """From the run's clocks."""


def compare(run: RunFigures, simulated: dict[str, Any] | None) -> list[Comparison]:
    """Padding, step efficiency and waiting share of a run.

    Costs predict the share of waiting among computing time if time were proportional to cost; the clock's share is
    of the whole step and holds the transfer of the gradients and the machine's jitter as well.

    Args:
        run: The run.
        simulated: A row of `read_simulated`, if there was a simulation.
    """
    row = simulated or {}
    summary = run.summary
    return [
        Comparison(name="padding", simulated=row.get("padding"), from_costs=summary.padding, measured=None),
        Comparison(
            name="step efficiency",
            simulated=row.get("efficiency"),
            from_costs=summary.step_efficiency,
            measured=run.clock_efficiency,
        ),
        Comparison(
            name="waiting",
            simulated=row.get("waiting"),
            from_costs=1 - summary.step_efficiency,
            measured=summary.wait_share,
        ),
    ]


def read_simulated(path: str | Path, run: RunFigures) -> dict[str, Any]:
    """The row of a simulation that predicts `run`: of its number of ranks, and of the lever that its label names.

    Args:
        path: What `aiak-ext simulate --json` or `aiak-ext analyze --json` printed.
        run: The run. Its label need not be a lever where only one row has its number of ranks.

    Raises:
        ValueError: the file is no such JSON, or not exactly one row fits.
    """
    rows = _rows(Path(path))
    num_ranks = len(run.ranks)
    fitting = [row for row in rows if row["ranks"] == num_ranks]
    if len(fitting) > 1:
        fitting = [row for row in fitting if row["lever"] == run.label]
    if len(fitting) != 1:
        known = sorted({f"{row['lever']} at {row['ranks']} ranks" for row in rows})
        raise ValueError(
            f"{path} holds {len(fitting)} predictions for the run {run.label!r} of {num_ranks} ranks (it has "
            f"{', '.join(known)}), so none can be put beside it. Simulate that setting alone, or name the run after "
            "its lever with --label."
        )
    return fitting[0]


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content["rows"] if "rows" in content else content["predicted"]
        return [{name: row[name] for name in ("lever", "ranks", "padding", "efficiency", "waiting")} for row in rows]
    except (KeyError, TypeError, ValueError) as error:  # JSON and decoding errors are ValueErrors
        raise ValueError(
            f"{path} holds no simulation ({type(error).__name__}: {error}), so there is no prediction to show. "
            "Give what `aiak-ext simulate --json` printed."
        ) from error
