"""A few answers of a trained model to look at: greedy, one process, on questions of the held-out split.

python -m examples.llava_ov.generate --load runs/stages/instruct/checkpoints --data-path runs/stages/data
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.distributed as dist

from examples.llava_ov import cpu_shim

cpu_shim.install()  # before Megatron core is imported

from megatron.core import dist_checkpointing, parallel_state
from transformers import PreTrainedTokenizerBase

from examples.llava_ov.arguments import parse_train_args
from examples.llava_ov.checkpoint import saved_settings
from examples.llava_ov.checkpoint_files import latest_checkpoint
from examples.llava_ov.config import model_family_of
from examples.llava_ov.data_loading import build_validation_batches, tokenizer_of
from examples.llava_ov.distributed_setup import initialize_megatron, start_process_group
from examples.llava_ov.model import IGNORE_INDEX, LlavaOnevision
from examples.llava_ov.model_setup import model_config_of
from examples.llava_ov.registry import get_model_provider
from examples.llava_ov.samples import LlavaBatch
from examples.llava_ov.tokenizer import TURN_END_TOKEN, token_id

_IMAGE = re.compile(r"<\|vision_start\|>(<\|image_pad\|>)+<\|vision_end\|>")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A sample up to the start of its first answer."""

    tokens: torch.Tensor
    """int64 [n]."""
    pixel_values: torch.Tensor
    """float32 [patches, dim], of the images asked about so far."""
    image_grid_thw: torch.Tensor
    """int64 [images, 3]."""
    reference: torch.Tensor
    """int64 [m], the answer in the data, with the token that ends the turn."""


def question_of(batch: LlavaBatch, image_token_id: int) -> Question:
    """Cut the question out of a batch of one sample, whose labels are set on answers only."""
    labels = batch.labels[0]
    is_answer = labels != IGNORE_INDEX
    start = int(is_answer.nonzero()[0])  # here the first token of the answer is predicted
    length = int(torch.cummin(is_answer[start:].to(torch.int), 0).values.sum())
    tokens = batch.tokens[0, : start + 1]
    visual_tokens = (batch.image_grid_thw.prod(1) // 4).cumsum(0)
    num_images = int((visual_tokens <= (tokens == image_token_id).sum()).sum())
    grids = batch.image_grid_thw[:num_images]
    return Question(
        tokens=tokens,
        pixel_values=batch.pixel_values[: int(grids.prod(1).sum())],
        image_grid_thw=grids,
        reference=labels[start : start + length],
    )


@torch.no_grad()
def greedy_answer(
    model: LlavaOnevision, question: Question, *, vocab_size: int, end_token_id: int, max_new_tokens: int
) -> list[int]:
    """The most likely next token, again and again, until the turn ends; without `end_token_id`.

    The whole sequence is computed anew for every token: short and plain rather than fast. Pictures are encoded once.
    """
    device = next(model.parameters()).device
    tokens = question.tokens.to(device)
    visual_tokens = model.encode_images(question.pixel_values.to(device), question.image_grid_thw)
    model.set_encoder(lambda images, grids: visual_tokens)
    answer: list[int] = []
    try:
        while len(answer) < max_new_tokens:
            logits = model(
                images=question.pixel_values,
                image_grid_thw=question.image_grid_thw,
                input_ids=tokens[None],
                position_ids=None,
                attention_mask=None,
            )
            best = logits[0, -1, :vocab_size].argmax()  # the vocabulary is padded
            if best == end_token_id:
                break
            answer.append(int(best))
            tokens = torch.cat([tokens, best[None]])
    finally:
        model.set_encoder(model.encode_images)
    return answer


def readable(tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor | list[int]) -> str:
    """Text of tokens, with `<image>` for each picture."""
    return _IMAGE.sub("<image> ", tokenizer.decode(tokens)).strip()


def load_arguments(directory: Path, data_path: str) -> argparse.Namespace:
    """Arguments of a run that fits the checkpoint in `directory`."""
    settings = saved_settings(directory)
    flags = ["--bf16"] if settings["bf16"] else []
    model_name = settings["model_name"]
    return parse_train_args(["--data-path", data_path, "--train-iters", "1", "--model-name", model_name, *flags])


def load_model(args: argparse.Namespace, directory: Path, device: torch.device) -> LlavaOnevision:
    """The model of a checkpoint of any parallel layout; needs Megatron's state of a world of one process."""
    provider = get_model_provider(model_family_of(args.model_name))
    model = provider(model_config_of(args, tokenizer_of(args))).to(device).eval()
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(directory))
    model.load_state_dict(state["model"])
    return model


def start_one_rank(args: argparse.Namespace) -> torch.device:
    """Process group and Megatron's state for this process alone, without torchrun."""
    os.environ.setdefault("LOCAL_RANK", "0")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = start_process_group(args.distributed_timeout_minutes)
    initialize_megatron(args)
    return device


@click.command(context_settings={"show_default": True})
@click.option("--load", required=True, help="Directory that training saved checkpoints in.")
@click.option("--data-path", required=True, help="Data set whose held-out questions are asked.")
@click.option("--num-answers", type=int, default=4)
@click.option("--max-new-tokens", type=int, default=48)
def main(load: str, data_path: str, num_answers: int, max_new_tokens: int) -> None:
    """Print questions, the answers in the data, and the model's answers."""
    directory = latest_checkpoint(load)
    if directory is None:
        raise click.ClickException(f"{load} holds no checkpoint; give the --save directory of a training run")
    args = load_arguments(directory, data_path)
    model = load_model(args, directory, start_one_rank(args))
    tokenizer = tokenizer_of(args)
    for batch in build_validation_batches(args, tokenizer)[:num_answers]:
        question = question_of(batch, model.model_config.image_token_id)
        answer = greedy_answer(
            model,
            question,
            vocab_size=len(tokenizer),
            end_token_id=token_id(tokenizer, TURN_END_TOKEN),
            max_new_tokens=max_new_tokens,
        )
        click.echo(f"\n== {batch.__key__[0]}\n{readable(tokenizer, question.tokens)}")
        click.echo(f"-- data:  {readable(tokenizer, question.reference)}")
        click.echo(f"-- model: {readable(tokenizer, answer)}")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
