"""What a model family brings to training: how its model is built, and who trains it in which phase.

`register_model_config` in `config` names the architectures; the factories registered here go with their family. A
family of one's own registers in its own module, which the command line's module imports.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from examples.llava_ov.config import LlavaOnevisionConfig

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

TRAINING_PHASES = ("pretrain", "sft")


class ModelProvider(Protocol):
    """Builds the part of a model that one pipeline stage (one chunk of it under virtual pipelining) holds."""

    def __call__(
        self,
        config: LlavaOnevisionConfig,
        pre_process: bool = True,
        post_process: bool = True,
        add_encoder: bool = True,
        add_decoder: bool = True,
        vp_stage: int | None = None,
    ) -> torch.nn.Module: ...


# Makes a trainer (a context manager with `train()`) from parsed arguments and the rank's device.
TrainerFactory = Callable[[argparse.Namespace, torch.device], Any]

_PROVIDERS: dict[str, ModelProvider] = {}
_TRAINERS: dict[tuple[str, str], TrainerFactory] = {}


def register_model_provider(model_family: str) -> Callable[[F], F]:
    """Decorator: register the function that builds models of `model_family`, see `ModelProvider`.

    Raises:
        ValueError: the family has a provider.
    """

    def decorator(provider: F) -> F:
        _add(_PROVIDERS, model_family, provider, "model provider", model_family)
        return provider

    return decorator


def register_model_trainer(model_family: str, training_phase: str) -> Callable[[F], F]:
    """Decorator: register the function that makes the trainer of `model_family` in `training_phase`.

    Raises:
        ValueError: the pair has a trainer, or the phase is unknown.
    """
    if training_phase not in TRAINING_PHASES:
        raise ValueError(f"training phase {training_phase!r} is unknown; choose one of {', '.join(TRAINING_PHASES)}")

    def decorator(factory: F) -> F:
        _add(_TRAINERS, (model_family, training_phase), factory, "trainer", f"{model_family}, {training_phase}")
        return factory

    return decorator


def get_model_provider(model_family: str) -> ModelProvider:
    """The registered builder of a family's models.

    Raises:
        ValueError: none is registered; the message lists those that are.
    """
    return _find(_PROVIDERS, model_family, f"model provider for family {model_family!r}", list(_PROVIDERS))


def get_model_trainer(model_family: str, training_phase: str) -> TrainerFactory:
    """The registered trainer of a family in a phase.

    Raises:
        ValueError: none is registered; the message lists those that are.
    """
    known = [f"({family}, {phase})" for family, phase in _TRAINERS]
    wanted = f"trainer for family {model_family!r} in phase {training_phase!r}"
    return _find(_TRAINERS, (model_family, training_phase), wanted, known)


def _add(registry: dict[Any, Any], key: Any, factory: Any, kind: str, name: str) -> None:
    if key in registry:
        raise ValueError(
            f"a {kind} for {name} is already registered ({registry[key].__qualname__}): the second would take its "
            "place unnoticed; choose another name"
        )
    registry[key] = factory


def _find(registry: Mapping[Any, T], key: Any, wanted: str, known: list[str]) -> T:
    if key not in registry:
        raise ValueError(f"there is no {wanted}; registered are: {', '.join(known) or 'none'}")
    return registry[key]
