"""Model registry and configuration checks; nothing here builds a model."""

from __future__ import annotations

import dataclasses

import pytest

from examples.llava_ov import config as config_module
from examples.llava_ov.config import get_model_config, list_model_configs, register_model_config


def test_lookup_by_short_and_full_name() -> None:
    assert get_model_config("4b") == get_model_config("llava-ov-1.5-4b")
    assert get_model_config("4b").language.hidden_size == 2560
    assert list_model_configs("llava-ov-1.5") == [
        f"llava-ov-1.5-{arch}" for arch in ("tiny", "3b", "4b", "8b", "14b", "32b")
    ]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model '5b'.*llava-ov-1\.5-tiny.*llava-ov-1\.5-32b"):
        get_model_config("5b")


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_MODEL_CONFIGS", dict(config_module._MODEL_CONFIGS))
    register_model_config("family", "arch")(lambda: get_model_config("tiny"))
    assert get_model_config("family-arch") == get_model_config("arch", "family") == get_model_config("tiny")
    with pytest.raises(ValueError, match="already registered"):
        register_model_config("family", "arch")(lambda: get_model_config("tiny"))


def test_with_vocab() -> None:
    config = get_model_config("tiny").with_vocab(1000, 999)
    assert (config.language.vocab_size, config.image_token_id) == (1000, 999)
    assert config.language.padded_vocab_size == 1024
    assert get_model_config("8b").language.padded_vocab_size == 151_936
    with pytest.raises(ValueError, match="image_token_id 1000 lies outside the vocabulary of 1000"):
        config.with_vocab(1000, 1000)


def test_with_runtime_changes_nothing_else() -> None:
    config = get_model_config("tiny").with_runtime(tensor_model_parallel_size=2, sequence_parallel=True)
    assert config.runtime.sequence_parallel
    assert dataclasses.replace(config, runtime=get_model_config("tiny").runtime) == get_model_config("tiny")
    with pytest.raises(ValueError, match="sequence_parallel is on with tensor_model_parallel_size 1"):
        get_model_config("tiny").with_runtime(sequence_parallel=True)
