"""Answers of a checkpoint: the question that is cut out of a sample, and greedy decoding."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from megatron.core.rerun_state_machine import destroy_rerun_state_machine

from examples.llava_ov.chat_template import IGNORE_INDEX, render_chat
from examples.llava_ov.checkpoint_files import latest_checkpoint
from examples.llava_ov.collate import pad_samples
from examples.llava_ov.generate import greedy_answer, load_arguments, load_model, main, question_of, readable
from examples.llava_ov.samples import LlavaSample
from examples.llava_ov.tokenizer import IMAGE_TOKEN, load_tokenizer, token_id
from examples.llava_ov.training import Trainer
from tests.demo_data import small_data_set
from tests.training_run import CPU, arguments, one_rank

pytestmark = pytest.mark.megatron_in_process

TOKENIZER = load_tokenizer(small_data_set() / "tokenizer")
IMAGE_ID = token_id(TOKENIZER, IMAGE_TOKEN)


def two_turns():
    """A batch of one conversation with a picture in each of its two questions."""
    messages = [
        {"role": "user", "content": "<image>\nWhat is this?"},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "<image>\nAnd this?"},
        {"role": "assistant", "content": "A dog."},
    ]
    grids = torch.tensor([[1, 4, 2], [1, 4, 4]])
    tokens, labels = (torch.tensor(ids) for ids in render_chat(TOKENIZER, messages, [2, 4]))
    generator = torch.Generator().manual_seed(0)
    sample = LlavaSample(
        __key__="pets",
        __restore_key__=(),
        tokens=tokens,
        labels=labels,
        pixel_values=torch.randn(24, 588, generator=generator),
        image_grid_thw=grids,
        total_len=len(tokens),
    )
    return pad_samples([sample], TOKENIZER.pad_token_id)


def test_the_question_ends_where_the_first_answer_begins():
    batch = two_turns()
    question = question_of(batch, IMAGE_ID)
    assert readable(TOKENIZER, question.tokens) == (
        "<|im_start|>user\n<image> What is this?<|im_end|>\n<|im_start|>assistant"
    )
    assert readable(TOKENIZER, question.reference) == "A cat.<|im_end|>"
    assert question.image_grid_thw.tolist() == [[1, 4, 2]]
    assert question.pixel_values.equal(batch.pixel_values[:8])


def test_prompts_are_learned_in_pretraining_only():
    messages = [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant", "content": "A cat."}]
    tokens, answers = render_chat(TOKENIZER, messages, [3])
    _, everything = render_chat(TOKENIZER, messages, [3], train_on_prompt=True)
    assert [label for label in everything if label != IGNORE_INDEX] == [t for t in tokens[1:] if t != IMAGE_ID]
    assert all(answer in (IGNORE_INDEX, label) for answer, label in zip(answers, everything))
    assert sum(label != IGNORE_INDEX for label in answers) < sum(label != IGNORE_INDEX for label in everything)


@pytest.fixture
def checkpoints(tmp_path):
    with one_rank():
        root = str(tmp_path / "checkpoints")
        with Trainer(arguments(tmp_path, "--save", root, "--train-iters", "1"), CPU) as trainer:
            trainer.train()
    return root


def test_greedy_answers_follow_the_most_likely_token(checkpoints):
    directory = latest_checkpoint(checkpoints)
    with one_rank():
        args = load_arguments(directory, str(small_data_set()))
        model = load_model(args, directory, CPU)
        question = question_of(two_turns(), IMAGE_ID)
        answer = greedy_answer(model, question, vocab_size=len(TOKENIZER), end_token_id=-1, max_new_tokens=5)
        whole = torch.cat([question.tokens, torch.tensor(answer)])
        logits = model(question.pixel_values, question.image_grid_thw, whole[None], None, None)
        likely = logits[0, len(question.tokens) - 1 : -1, : len(TOKENIZER)].argmax(-1)
        assert likely.tolist() == answer
        ended = greedy_answer(model, question, vocab_size=len(TOKENIZER), end_token_id=answer[0], max_new_tokens=5)
        assert ended == []


def test_command_prints_the_datas_answer_beside_the_models(checkpoints):
    options = ["--load", checkpoints, "--data-path", str(small_data_set()), "--num-answers", "2"]
    done = CliRunner().invoke(main, [*options, "--max-new-tokens", "3"], catch_exceptions=False)
    destroy_rerun_state_machine()
    assert done.exit_code == 0
    assert done.output.count("-- model:") == done.output.count("-- data:") == 2


def test_a_directory_without_checkpoint_is_named(tmp_path):
    done = CliRunner().invoke(main, ["--load", str(tmp_path), "--data-path", "none"])
    assert done.exit_code == 1
    assert "holds no checkpoint" in done.output
