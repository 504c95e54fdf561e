"""The cost file that `aiak-ext calibrate` writes and `analyze` and `simulate` read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_balance import CostModel, SampleCostModel
from data_balance.cost import NEXT_TO_NOTHING

PARTS = ("language", "vision")


def read_cost_file(path: str | Path) -> SampleCostModel:
    """Read ``{"language": {"linear", "quadratic", "constant"}, "vision": {...}}``; a part that is absent costs nothing.

    Raises:
        ValueError: the file is not such JSON, or has no coefficients of the language model.
    """
    content = _read(Path(path))
    if "language" not in content:
        raise ValueError(
            f"cost file {path} has no part 'language', so samples cannot be weighed; run `aiak-ext calibrate --part "
            "language` with the same --output"
        )
    try:
        models = {part: CostModel(**content[part]["coefficients"]) for part in PARTS if part in content}
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"cost file {path} has a part without coefficients linear, quadratic and constant ({error!r}); write it "
            "with `aiak-ext calibrate`"
        ) from error
    return SampleCostModel(vision=models.get("vision", CostModel(NEXT_TO_NOTHING, 0.0)), language=models["language"])


def write_cost_part(path: str | Path, part: str, model: CostModel, details: dict[str, Any]) -> None:
    """Put one part's coefficients (seconds) into the file, beside the other part's where it is there already."""
    target = Path(path)
    content = _read(target) if target.exists() else {}
    content[part] = {"coefficients": asdict(model), **details}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"cost file {path} cannot be read ({error}); give the output of `aiak-ext calibrate`"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"cost file {path} holds no JSON object; give the output of `aiak-ext calibrate`")
    return content
