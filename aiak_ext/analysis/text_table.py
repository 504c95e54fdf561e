"""Plain text tables and numbers for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as a table: text to the left, numbers to the right; None is a dash."""
    names = list(rows[0])
    columns = [[name, *(format_cell(row[name]) for row in rows)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    is_text = [any(isinstance(row[name], str) for row in rows) for name in names]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if text else c.rjust(w) for c, w, text in zip(cells, widths, is_text)]
        return "  ".join(padded).rstrip()

    head, *body = [line(cells) for cells in zip(*columns)]
    return "\n".join([head, "  ".join("-" * width for width in widths), *body])


def format_cell(value: Any) -> str:
    """A table cell: floats to three places from 0.001 to 1000 and shorter beyond."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.4g}"
    return str(value)


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f}%"


def gibibytes(num_bytes: float) -> str:
    """Bytes in GiB with two decimals."""
    return f"{num_bytes / 1024**3:.2f} GiB"
