"""Registries of model providers and trainers: lookups, names that are taken, lists of what exists."""

from __future__ import annotations

import pytest

from examples.llava_ov import registry, trainers
from examples.llava_ov.config import model_family_of
from examples.llava_ov.model import build_model
from examples.llava_ov.registry import (
    get_model_provider,
    get_model_trainer,
    register_model_provider,
    register_model_trainer,
)


@pytest.fixture(autouse=True)
def empty_again(monkeypatch):
    """What a test registers is gone after it."""
    for name in ("_PROVIDERS", "_TRAINERS"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def test_every_size_of_the_family_finds_its_provider_and_trainers():
    family = model_family_of("8b")
    assert family == model_family_of("llava-ov-1.5-tiny") == "llava-ov-1.5"
    assert get_model_provider(family) is build_model
    assert get_model_trainer(family, "sft") is trainers.sft_trainer
    assert get_model_trainer(family, "pretrain") is trainers.pretrain_trainer


def test_what_is_registered_is_found_and_its_name_is_taken():
    @register_model_provider("mine")
    def provider(config, **stage):
        return None

    @register_model_trainer("mine", "sft")
    def trainer(args, device):
        return None

    assert get_model_provider("mine") is provider
    assert get_model_trainer("mine", "sft") is trainer
    with pytest.raises(ValueError, match=r"model provider for mine is already registered \(.*provider\)"):
        register_model_provider("mine")(provider)
    with pytest.raises(ValueError, match="trainer for mine, sft is already registered"):
        register_model_trainer("mine", "sft")(trainer)


def test_unknown_names_list_what_exists():
    with pytest.raises(ValueError, match=r"no model provider for family 'none'; registered are: llava-ov-1\.5"):
        get_model_provider("none")
    with pytest.raises(ValueError, match=r"'none' in phase 'sft'; registered are: \(llava-ov-1\.5, pretrain\), \("):
        get_model_trainer("none", "sft")
    with pytest.raises(ValueError, match="training phase 'dpo' is unknown; choose one of pretrain, sft"):
        register_model_trainer("mine", "dpo")
    with pytest.raises(ValueError, match="unknown model '5b'"):
        model_family_of("5b")
