"""Reads sample lengths from a CSV or JSONL file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from aiak_ext.analysis.samples import SampleTable

LENGTH_COLUMNS = ("total_tokens", "num_tokens", "total_len", "length")
PATCH_COLUMNS = ("vit_patches", "num_patches", "patches")
#: Columns that say where a sample is read, used as they are named.
PLACE_COLUMNS = ("rank", "worker", "shard")


def read_lengths_file(path: str | Path, *, length_column: str | None = None, limit: int | None = None) -> SampleTable:
    """Samples of a CSV (with a header line) or of a JSONL file (an object per line, or bare numbers).

    Args:
        path: A file that ends in .csv, or in .jsonl, .json or .ndjson.
        length_column: Column of the length in tokens; by default the first of `LENGTH_COLUMNS` that is there.
        limit: Most rows to read; None for all.

    Raises:
        ValueError: no such column, or a value that is not a whole number.
    """
    file = Path(path)
    rows: list[dict[str, Any]] = []
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines) if file.suffix == ".csv" else _json_rows(lines, file):
            if limit is not None and len(rows) == limit:
                break
            rows.append(row)
    if not rows:
        raise ValueError(f"{file} has no rows, so there is nothing to analyze; give a file with one sample per line")
    column = length_column or _first_of(LENGTH_COLUMNS, rows[0])
    if column is None or column not in rows[0]:
        raise ValueError(
            f"{file} has no column {length_column or ' or '.join(LENGTH_COLUMNS)}; its columns are "
            f"{', '.join(rows[0])}: name the one that holds tokens with --length-column"
        )
    patches = _first_of(PATCH_COLUMNS, rows[0])
    places = {name: [row[name] for row in rows] for name in PLACE_COLUMNS if name in rows[0]}
    return SampleTable(
        source=file.name,
        num_tokens=_integers(rows, column, file),
        num_patches=_integers(rows, patches, file) if patches else np.zeros(0, dtype=np.int64),
        rank=np.array(places["rank"], dtype=np.int64) if "rank" in places else None,
        worker=np.array(places["worker"], dtype=np.int64) if "worker" in places else None,
        shard=np.array(places["shard"], dtype=np.str_) if "shard" in places else None,
    )


def _json_rows(lines: Iterable[str], file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {file} is no JSON ({error}); give one object per line") from error
        yield row if isinstance(row, dict) else {"length": row}


def _first_of(names: Iterable[str], row: dict[str, Any]) -> str | None:
    return next((name for name in names if name in row), None)


def _integers(rows: list[dict[str, Any]], column: str, file: Path) -> np.ndarray:
    values = []
    for number, row in enumerate(rows, start=1):
        try:
            value = float(row[column])
            values.append(int(value))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"row {number} of {file} has {column} = {row.get(column)!r}; give a number") from error
        if value != values[-1]:
            raise ValueError(f"row {number} of {file} has {column} = {value}; give a whole number")
    return np.array(values, dtype=np.int64)
