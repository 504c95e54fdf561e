"""What the example's README says of its tests: they exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.distributed.test_example_matrix import LAYOUTS, LEVERS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "examples" / "llava_ov" / "README.md").read_text(encoding="utf-8")


def test_table_of_layouts_and_levers_names_every_test() -> None:
    in_layouts = re.findall(r"`test_lever_in_layout\[([^`]*)\]`", README)
    assert sorted(in_layouts) == sorted(f"{layout}-{lever}" for layout in LAYOUTS for lever in LEVERS)
    assert re.findall(r"`test_lever_in_data_parallelism\[([^`]*)\]`", README) == list(LEVERS)


def test_files_named_exist() -> None:
    for path in re.findall(r"`(tests/[\w/]+\.py)`", README):
        assert (ROOT / path).is_file(), path
