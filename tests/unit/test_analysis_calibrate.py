"""Calibration fits what a module costs and its file is what the other commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from aiak_ext.analysis import calibrate as calibrate_module
from aiak_ext.analysis.calibrate import calibrate
from aiak_ext.analysis.cost_file import read_cost_file, write_cost_part
from aiak_ext.analysis.load_object import load_instance, load_object
from data_balance import CostModel


def test_known_times_give_their_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_module, "seconds_of_step", lambda step, n: 2e-6 * n + 3e-9 * n * n + 1e-3)
    result = calibrate(lambda n: torch.zeros(1), (128, 256, 512, 1024))
    assert result.model.linear == pytest.approx(2e-6, rel=1e-3)
    assert result.model.quadratic == pytest.approx(3e-9, rel=1e-3)
    assert result.model.constant == pytest.approx(1e-3, rel=1e-3)
    assert max(map(abs, result.relative_errors)) < 1e-6
    assert [row["length"] for row in result.rows()] == [128, 256, 512, 1024]


def test_forward_and_backward_run_as_often_as_asked() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    lengths: list[int] = []

    def step(length: int) -> torch.Tensor:
        lengths.append(length)
        return weight * torch.ones(length, 4)

    calibrate(step, (2, 3, 5), repeats=2, warmup=1)
    assert lengths == [2, 2, 2, 3, 3, 3, 5, 5, 5]
    assert weight.grad is not None and weight.grad.tolist() == [30.0] * 4


def test_too_few_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="three different positive lengths"):
        calibrate(lambda n: torch.zeros(1), (2, 2, 3))


def test_cost_file_keeps_both_parts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    write_cost_part(path, "vision", CostModel(1.0, 2.0), {"device": "CPU"})
    with pytest.raises(ValueError, match="no part 'language'"):
        read_cost_file(path)
    write_cost_part(path, "language", CostModel(3.0, 4.0, 5.0), {"device": "CPU"})
    costs = read_cost_file(path)
    assert costs.vision == CostModel(1.0, 2.0)
    assert costs.language == CostModel(3.0, 4.0, 5.0)
    assert json.loads(path.read_text())["vision"]["device"] == "CPU"
    path.write_text('{"language": {}}')
    with pytest.raises(ValueError, match="part without coefficients"):
        read_cost_file(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="no JSON object"):
        read_cost_file(path)


def test_objects_are_named_by_module_and_attribute() -> None:
    assert load_object("data_balance.cost:CostModel") is CostModel
    assert load_instance("collections:OrderedDict") == {}
    for name, message in (
        ("data_balance", "write package.module:Name"),
        ("no_such_module:x", "cannot be imported"),
        ("data_balance:nothing", "has no 'nothing'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_object(name)
    with pytest.raises(ValueError, match="cannot be called without arguments"):
        load_instance("data_balance.cost:CostModel")
