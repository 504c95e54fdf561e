"""Matplotlib figures as SVG elements that take their colours and fonts from the page around them."""

from __future__ import annotations

import html
import io
import re
from typing import Any

# Colours to draw with, and the custom property of the page that replaces each one.
TEXT = "#1b1f24"
GRID = "#c9ced6"
SERIES = ("#1f6fb4", "#d1660a", "#2a8a4a", "#a63c9a", "#b8322e", "#6a54c4", "#7d6b1c", "#1a8a94")
_PROPERTIES = {TEXT: "--text", GRID: "--grid"} | {color: f"--series-{i}" for i, color in enumerate(SERIES)}

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "svg.hashsalt": "aiak-ext",  # the same figure gives the same file
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "grid.alpha": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
}
"""Matplotlib settings to create and to save figures with."""


def inline_svg(figure: Any, name: str, description: str) -> str:
    """A figure as an `<svg>` element.

    Args:
        figure: Matplotlib's.
        name: Of the plot; ids within the element begin with it, because a page holds several figures.
        description: What the plot shows, for those who cannot see it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--plot-font)", svg)
    for color, variable in _PROPERTIES.items():
        svg = svg.replace(color, f"var({variable})")
    attributes = f'data-plot="{name}" role="img" aria-label="{html.escape(description)}"'
    return svg.replace("<svg ", f"<svg {attributes} ", 1)
