"""Registries of model providers and trainers: lookups, names that are taken, lists of what exists."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import destroy_rerun_state_machine

from aiak_ext.run_summary import read_records
from examples.llava_ov import registry, train, trainers
from examples.llava_ov.config import MODEL_FAMILY, model_family_of
from examples.llava_ov.model import build_model
from examples.llava_ov.registry import (
    get_model_provider,
    get_model_trainer,
    register_model_provider,
    register_model_trainer,
)
from tests.demo_data import small_data_set

pytestmark = pytest.mark.megatron_in_process


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


def test_the_command_trains_with_what_is_registered(tmp_path, monkeypatch):
    """Question tokens carry loss in the pretrain phase, so that the phases' losses differ from the same weights."""
    losses = {}
    for phase in registry.TRAINING_PHASES:
        made = []
        factory = registry._TRAINERS[MODEL_FAMILY, phase]

        def counted(args, device, made=made, factory=factory):
            made.append(args.training_phase)
            return factory(args, device)

        registry._TRAINERS[MODEL_FAMILY, phase] = counted
        flags = {"--training-phase": phase, "--train-iters": "1", "--num-workers": "0"}
        paths = {"--data-path": str(small_data_set()), "--metrics-dir": str(tmp_path / phase)}
        words = [word for pair in {**flags, **paths}.items() for word in pair]
        monkeypatch.setattr(sys, "argv", ["train", *words])
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            train.main()
        finally:
            destroy_rerun_state_machine()
            parallel_state.destroy_model_parallel()
        assert made == [phase]
        losses[phase] = read_records(tmp_path / phase)[0].scalars["loss"]
    assert losses["pretrain"] != losses["sft"]
