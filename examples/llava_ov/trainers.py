"""The trainers of LLaVA-OneVision: the same loop in both phases, with another choice of the tokens that are learned."""

from __future__ import annotations

import argparse

import torch

from examples.llava_ov.config import MODEL_FAMILY
from examples.llava_ov.registry import register_model_trainer
from examples.llava_ov.training import Trainer


@register_model_trainer(MODEL_FAMILY, "pretrain")
def pretrain_trainer(args: argparse.Namespace, device: torch.device) -> Trainer:
    """Learns every text token, questions too."""
    return Trainer(args, device, train_on_prompt=True)


@register_model_trainer(MODEL_FAMILY, "sft")
def sft_trainer(args: argparse.Namespace, device: torch.device) -> Trainer:
    """Learns the answers, as all three stages of the recipe do."""
    return Trainer(args, device, train_on_prompt=False)
