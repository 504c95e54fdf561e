"""The report as one HTML file: nothing is fetched, nothing is run, so it reads offline and anywhere."""

from __future__ import annotations

import html
from collections.abc import Sequence

from aiak_ext.convergence import REMEDY
from aiak_ext.reporting.plots import PLOTS, render
from aiak_ext.reporting.prediction import Comparison
from aiak_ext.reporting.run_figures import RunFigures
from aiak_ext.reporting.stylesheet import STYLESHEET
from aiak_ext.reporting.tables import Rows, comparison_rows, summary_rows

# Nothing may be loaded or run, so a label that holds markup could not do harm either.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(runs: Sequence[RunFigures], comparisons: Sequence[Sequence[Comparison]]) -> str:
    """The HTML of one run or of two beside each other.

    Args:
        runs: One or two.
        comparisons: Of each run, from `prediction.compare`.
    """
    title = f"Training run{'s' if len(runs) > 1 else ''}: " + " and ".join(run.label for run in runs)
    sources = "".join(f'<p class="muted">{_text(run.label)}: <code>{_text(run.source)}</code></p>' for run in runs)
    body = [
        f"<h1>{_text(title)}</h1>",
        sources,
        *_warnings(runs),
        "<h2>Figures</h2>",
        f'<p class="muted">Times leave out the warm-up, in which workers start (steps: {runs[0].warmup_steps}).</p>',
        _table(summary_rows(runs)),
        *_predictions(runs, comparisons),
        *_convergence(runs),
        "<h2>Step by step</h2>",
        *_plots(runs),
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{_text(title)}</title>\n<style>\n{STYLESHEET}\n</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def _warnings(runs: Sequence[RunFigures]) -> list[str]:
    return [
        f'<div class="warning"><strong>{_text(run.label)}: {_text(run.order.describe())}.</strong> '
        f"{_text(REMEDY)}.</div>"
        for run in runs
        if run.order.is_correlated
    ]


def _predictions(runs: Sequence[RunFigures], comparisons: Sequence[Sequence[Comparison]]) -> list[str]:
    lines = [
        "<h2>Prediction and reality</h2>",
        "<p>Simulated: by <code>aiak-ext simulate</code> from the data set alone (option <code>--predicted</code>). "
        "From the run's costs: exact for padding and efficiency, and the waiting that there would be if time went by "
        "cost. By the clock: computing time per rank in the place of cost, and time at the gradient all-reduce, which "
        "holds the transfer and the machine's jitter as well.</p>",
    ]
    for run, compared in zip(runs, comparisons):
        lines += [f"<h3>{_text(run.label)}</h3>" if len(runs) > 1 else "", _table(comparison_rows(compared))]
    return lines


def _convergence(runs: Sequence[RunFigures]) -> list[str]:
    """The guard's findings; what it warns of stands at the top of the page as well."""
    lines = ["<h2>Convergence guard</h2>", "<ul>"]
    for run in runs:
        samples = run.samples_per_step
        spread = f"{samples.min():.0f} to {samples.max():.0f} samples per optimizer step"
        age = f"; the oldest deferred sample waited {run.max_deferral_age} round(s)" if run.has_deferrals else ""
        lines.append(f"<li>{_text(run.label)}: {_text(run.order.describe())}; {spread}{age}.</li>")
    return [*lines, "</ul>"]


def _plots(runs: Sequence[RunFigures]) -> list[str]:
    figures = [
        f"<figure>\n<h3>{_text(plot.title)}</h3>\n{render(plot, runs)}\n"
        f"<figcaption>{_text(plot.caption)}</figcaption>\n</figure>"
        for plot in PLOTS
        if any(plot.is_present(run) for run in runs)
    ]
    return [f'<div class="plots{" beside" if len(runs) > 1 else ""}">', *figures, "</div>"]


def _table(rows: Rows) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in rows[0])
    lines = []
    for row in rows:
        first, *rest = row.values()
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{_text(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + ("\n</tbody>\n</table></div>")
    )


def _text(value: str) -> str:
    return html.escape(value)
