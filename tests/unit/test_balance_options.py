"""Options, model config file, and saved state without processes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from data_balance import BalanceOptions, CostModel, ModelConfig, SampleCostModel, loader_state
from data_balance.options import DEFAULT_COST_MODEL, SQUARED_LENGTH, choose_cost_model
from data_balance.state import BalanceState, restore_loader, save_loader


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_model_config_gives_the_encoders_dp_size_and_costs(tmp_path: Path) -> None:
    encoder = {"tensor_model_parallel_size": 2, "pp": 2, "hidden_size": 64, "ffn_hidden_size": 256, "num_layers": 2}
    path = write(tmp_path / "model.json", {"image_encoder": {"vision_encoder": encoder}})
    config = ModelConfig.from_json(path)
    assert config.encoder_ranks == 4 and config.language is None
    assert config.vision == CostModel.for_transformer(64, 256, 2)
    config.check_group(group_size=2, world_size=8)
    with pytest.raises(ValueError, match=r"tp x pp x cp = 4 of 8 ranks.*group to balance has 4"):
        config.check_group(group_size=4, world_size=8)
    with pytest.raises(ValueError, match="group to balance"):
        config.check_group(group_size=1, world_size=6)


def test_an_encoder_dp_size_of_one_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig.from_json(write(tmp_path / "model.json", {"image_encoder": {"tp": 2}}))
    with caplog.at_level(logging.WARNING):
        config.check_group(group_size=1, world_size=2)
    assert "data-parallel size is 1" in caplog.text


@pytest.mark.parametrize(
    "content", [[], {}, {"image_encoder": 3}, {"image_encoder": {"tp": 0}}, {"image_encoder": {"cp": "2"}}]
)
def test_bad_model_configs_are_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(ValueError, match=r"image.encoder"):
        ModelConfig.from_json(write(tmp_path / "model.json", content))
    with pytest.raises(ValueError, match="cannot be read"):
        ModelConfig.from_json(tmp_path / "missing.json")


def test_cost_model_choice() -> None:
    own = SampleCostModel(CostModel(1, 0), CostModel(2, 0))
    config = ModelConfig(vision=CostModel(5, 5))
    sums = np.array([[100, 10_000, 10, 100]])
    assert choose_cost_model(own, config, "lpt") is own
    assert choose_cost_model(CostModel(1, 0), None, "lpt").cost(sums)[0] == pytest.approx(10)
    assert choose_cost_model(None, config, "lpt").vision == CostModel(5, 5)
    assert choose_cost_model(None, None, "lpt") is DEFAULT_COST_MODEL
    squared = choose_cost_model(None, None, "post_global_balancing_greedy_without_pad")
    assert squared is SQUARED_LENGTH and squared.cost(sums)[0] == 10_100


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"calculate_per_token_loss": False}, "calculate_per_token_loss is off"),
        ({"threshold": 1.0}, "threshold"),
        ({"tolerance": -0.1}, "tolerance"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_bad_options_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BalanceOptions(**settings)


def test_state_is_the_loaders_own_unless_there_is_more() -> None:
    assert BalanceState({"position": 3}).to_builtins() == {"position": 3}
    fitted = SampleCostModel(CostModel(1e-6, 2e-9), CostModel(3e-6, 4e-9, 0.5))
    state = BalanceState({"position": 3}, consumed=2, cost_model=fitted).to_builtins()
    assert BalanceState.from_builtins(state) == BalanceState({"position": 3}, 2, fitted)
    assert loader_state(state) == {"position": 3} == loader_state({"position": 3})


def test_loaders_of_energon_and_ours_and_others() -> None:
    class Energon:
        state = 0

        def save_state_rank(self) -> int:
            return self.state

        def restore_state_rank(self, state: int) -> None:
            self.state = state

    loader = Energon()
    restore_loader(loader, 5)
    restore_loader(loader, None)
    assert save_loader(loader) == 5
    for call in (save_loader, lambda it: restore_loader(it, 1)):
        with pytest.raises(ValueError, match="savable loader itself"):
            call(iter([]))
