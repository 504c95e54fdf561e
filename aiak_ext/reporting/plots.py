"""What the report draws of a run, one function per plot, on matplotlib axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiak_ext.reporting.inline_svg import SERIES, STYLE, inline_svg
from aiak_ext.reporting.run_figures import FloatArray, RunFigures

#: Points of a curve; longer runs are averaged over neighbouring steps, or files would grow with the run.
MOST_POINTS = 300
#: Ranks with a curve of their own; of more the mean and the range are drawn.
MOST_RANK_CURVES = len(SERIES)
_BINS_PER_OCTAVE = 8
_PANEL_SIZE = (5.6, 2.5)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure of the report: a column per run."""

    name: str
    title: str
    caption: str
    draw: Callable[[RunFigures, Sequence[Any]], None]
    """Draws a run on the axes of its column."""
    num_rows: int = 1
    share_x: bool = False
    """Whether two runs have one horizontal axis; over steps each has its own, as they may differ in length."""
    is_present: Callable[[RunFigures], bool] = lambda run: True
    """Whether the run recorded what the plot shows."""


def render(plot: Plot, runs: Sequence[RunFigures]) -> str:
    """The plot of one or two runs beside each other, on equal axes, as an `<svg>` element."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # here: importing it takes a second, and other commands draw nothing

    with rc_context(STYLE):  # type: ignore[arg-type]
        width, height = _PANEL_SIZE
        figure = Figure(figsize=(width * len(runs), height * plot.num_rows + 0.3), layout="constrained")
        axes = figure.subplots(
            plot.num_rows, len(runs), sharex="row" if plot.share_x else False, sharey="row", squeeze=False
        )
        for column, run in zip(axes.T, runs):
            if len(runs) > 1:
                column[0].set_title(run.label, pad=20)  # above the legend
            if plot.is_present(run):
                plot.draw(run, column)
                for panel in column:
                    if labels := panel.get_legend_handles_labels()[1]:
                        panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(len(labels), 4))
            else:
                column[0].text(0.5, 0.5, "not recorded", transform=column[0].transAxes, ha="center")
        return inline_svg(figure, plot.name, plot.title)


def _histograms(run: RunFigures, axes: Sequence[Any]) -> None:
    from matplotlib.ticker import EngFormatter, NullFormatter, ScalarFormatter

    per = "sample" if run.has_single_samples else "rank and step"
    for panel, name, color in zip(axes, ("num_tokens", "cost"), SERIES):
        values = run.field(name).ravel()
        values = values[values > 0]
        if not len(values):
            continue  # the loop gave no costs
        # Lengths spread over orders of magnitude, and bins at powers of two are the same in every run.
        low, high = (np.log2(values) * _BINS_PER_OCTAVE).min(), (np.log2(values) * _BINS_PER_OCTAVE).max()
        edges = 2 ** (np.arange(np.floor(low), np.floor(high) + 2) / _BINS_PER_OCTAVE)
        panel.hist(values, bins=edges, color=color, alpha=0.85)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(ScalarFormatter() if name == "num_tokens" else EngFormatter(places=1, sep=""))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel(f"{'tokens' if name == 'num_tokens' else 'cost'} per {per}")
        panel.set_ylabel("records")


def _rank_cost(run: RunFigures, axes: Sequence[Any]) -> None:
    from matplotlib.ticker import EngFormatter

    per_rank, ratio = axes
    if len(run.ranks) <= MOST_RANK_CURVES:
        for rank, values, color in zip(run.ranks, run.cost, SERIES):
            _curve(per_rank, run, values, color=color, label=f"rank {rank}")
    else:
        _curve(per_rank, run, np.nanmean(run.cost, axis=0), label="mean rank")
        _band(per_rank, run, np.nanmin(run.cost, axis=0), np.nanmax(run.cost, axis=0), label="lightest to heaviest")
    per_rank.yaxis.set_major_formatter(EngFormatter(sep=""))
    per_rank.set_ylabel("cost")
    _curve(ratio, run, run.cost_max_over_mean, label="as trained")
    balanced = (
        (SERIES[1], "imbalance_before", "before the balance"),
        (SERIES[2], "imbalance_after", "after the balance, as planned"),
    )
    for color, name, label in balanced:
        values = run.scalar(f"balance/{name}")
        if values is not None:
            _curve(ratio, run, np.nanmean(values, axis=0), color=color, linestyle="--", label=label)
    ratio.set_ylabel("heaviest / mean rank")


def _step_time(run: RunFigures, axes: Sequence[Any]) -> None:
    (panel,) = axes
    times = run.step_time_s
    mean, deviation = float(np.nanmean(times)), float(np.nanstd(times))
    _curve(panel, run, times, label="slowest rank")
    panel.axhline(mean, color=SERIES[1], linewidth=1, label=f"mean {mean:.3g} s, deviation {deviation:.3g} s")
    panel.axhspan(mean - deviation, mean + deviation, color=SERIES[1], alpha=0.15, linewidth=0)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("seconds per step")


def _padding(run: RunFigures, axes: Sequence[Any]) -> None:
    (panel,) = axes
    _curve(panel, run, run.padding, label="step")
    total = run.summary.padding
    panel.axhline(total, color=SERIES[1], linewidth=1, label=f"whole run {total:.1%}")
    _share(panel, "padding")


def _waiting(run: RunFigures, axes: Sequence[Any]) -> None:
    (panel,) = axes
    _curve(panel, run, run.wait_share, label=f"measured {run.summary.wait_share:.1%}")
    from_costs = 1 - 1 / run.cost_max_over_mean
    label = f"predicted from costs {1 - run.summary.step_efficiency:.1%}"
    _curve(panel, run, from_costs, color=SERIES[1], linestyle="--", label=label)
    _curve(panel, run, run.data_share, color=SERIES[2], label=f"for data {run.total_data_share:.1%}")
    _share(panel, "share of the ranks' time")


def _emitted(run: RunFigures, axes: Sequence[Any]) -> None:
    per_step, over_time = axes
    _curve(per_step, run, run.samples_per_step)
    per_step.set_ylim(bottom=0)
    per_step.set_ylabel("samples per step")
    seconds = np.nancumsum(run.step_time_s)
    samples = np.cumsum(np.where(run.timed, run.samples_per_step, 0))
    kept = np.unique(np.linspace(0, len(seconds) - 1, MOST_POINTS).astype(int))
    over_time.plot(seconds[kept], samples[kept], color=SERIES[0], label=f"{run.summary.samples_per_s:.3g} samples/s")
    over_time.set_xlabel("seconds of training after the warm-up")
    over_time.set_ylabel("emitted samples")


def _plan_times(run: RunFigures, axes: Sequence[Any]) -> None:
    (panel,) = axes
    for color, name in zip(SERIES, ("plan", "exchange")):
        values = run.scalar(f"balance/{name}_s")
        if values is not None:
            milliseconds = 1000 * np.nanmax(values, axis=0)
            label = f"{name} (mean {np.nanmean(milliseconds):.3g} ms)"
            _curve(panel, run, milliseconds, color=color, label=label)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("milliseconds, slowest rank")


def _deferrals(run: RunFigures, axes: Sequence[Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    age, count = axes
    _curve(age, run, np.nanmax(run.field("max_deferral_age"), axis=0), color=SERIES[1])
    age.set_ylabel("oldest, in rounds")
    _curve(count, run, np.nansum(run.field("deferred_samples"), axis=0))
    count.set_ylabel("samples put off so far")
    for panel in axes:
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))


def _order(run: RunFigures, axes: Sequence[Any]) -> None:
    (panel,) = axes
    _curve(panel, run, run.mean_length, label=f"step to step {run.order.autocorrelation:.2f}")
    panel.set_ylabel("tokens per sample")


def _loss(run: RunFigures, axes: Sequence[Any]) -> None:
    (panel,) = axes
    values = run.scalar("loss")
    assert values is not None  # is_present
    emitted, losses = _averaged(np.cumsum(run.samples_per_step)), _averaged(np.nanmean(values, axis=0))
    panel.plot(emitted, losses, color=SERIES[0])
    panel.set_xlabel("emitted samples")
    panel.set_ylabel("loss")


PLOTS = (
    Plot(
        name="lengths",
        title="Length and cost histograms",
        caption="How much work a record holds: the wider, the more a rank can wait for another.",
        draw=_histograms,
        num_rows=2,
        share_x=True,
    ),
    Plot(
        name="rank-cost",
        title="Cost per rank and step",
        caption="Ranks whose curves lie on each other do not wait. Below, the heaviest rank against the mean: 1 is "
        "even. Where samples or images were balanced, also before the move and as planned; images that move inside "
        "the forward are counted on the rank that loaded them.",
        draw=_rank_cost,
        num_rows=2,
    ),
    Plot(
        name="step-time",
        title="Step time and its variance",
        caption="Time of the slowest rank; the band is one standard deviation around the mean.",
        draw=_step_time,
    ),
    Plot(
        name="padding",
        title="Padding",
        caption="Share of the token slots of all ranks that holds padding.",
        draw=_padding,
    ),
    Plot(
        name="waiting",
        title="Waiting, predicted and measured",
        caption="Measured: time at the gradient all-reduce, its transfer included. Predicted: what ranks would wait "
        "if time went by cost. What the first has beyond the second is transfer, jitter and work outside the model.",
        draw=_waiting,
    ),
    Plot(
        name="order",
        title="Order of lengths",
        caption="Mean sample length of the steps. Waves or a trend mean that order correlates with length, and the "
        "loss follows them.",
        draw=_order,
    ),
    Plot(
        name="emitted",
        title="Emitted samples",
        caption="Samples of all ranks per optimizer step, and in total over the time of training.",
        draw=_emitted,
        num_rows=2,
        share_x=True,
    ),
    Plot(
        name="deferrals",
        title="Deferred samples",
        caption="Online dynamic batching puts samples off to later rounds: how long the oldest has waited, and how "
        "often that happened so far.",
        draw=_deferrals,
        num_rows=2,
        is_present=lambda run: run.has_deferrals,
    ),
    Plot(
        name="plan-exchange",
        title="Plan and exchange time",
        caption="What the data balance took per step on the slowest rank, hidden behind the training or not.",
        draw=_plan_times,
        is_present=lambda run: run.scalar("balance/plan_s") is not None,
    ),
    Plot(
        name="loss",
        title="Loss",
        caption="Over emitted samples, so that runs with steps of different sizes compare.",
        draw=_loss,
        is_present=lambda run: run.scalar("loss") is not None,
    ),
)


def _curve(panel: Any, run: RunFigures, values: FloatArray, color: str = SERIES[0], **style: Any) -> None:
    """A value per step [steps] over steps."""
    from matplotlib.ticker import MaxNLocator

    panel.plot(_averaged(run.steps), _averaged(values), color=color, **style)
    group = _group_size(len(run.steps))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("step" if group == 1 else f"step (means of {group})")


def _band(panel: Any, run: RunFigures, low: FloatArray, high: FloatArray, label: str) -> None:
    panel.fill_between(
        _averaged(run.steps), _averaged(low), _averaged(high), color=SERIES[0], alpha=0.25, linewidth=0, label=label
    )


def _share(panel: Any, name: str) -> None:
    from matplotlib.ticker import PercentFormatter

    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    panel.set_ylabel(name)


def _group_size(count: int) -> int:
    return -(-count // MOST_POINTS)


def _averaged(values: NDArray[Any]) -> FloatArray:
    """Means over groups of neighbouring values, at most `MOST_POINTS` of them; NaN where a group has no value."""
    group = _group_size(len(values))
    padded = np.full(-(-len(values) // group) * group, np.nan)
    padded[: len(values)] = values
    rows = padded.reshape(-1, group)
    known = (~np.isnan(rows)).sum(axis=1)
    return np.divide(np.nansum(rows, axis=1), known, out=np.full(len(rows), np.nan), where=known > 0)
