"""From messages to tokens and labels: ChatML turns, visual tokens in place, loss on the answers only."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from examples.llava_ov.tokenizer import (
    IMAGE_TOKEN,
    TURN_END_TOKEN,
    TURN_START_TOKEN,
    VISION_END_TOKEN,
    VISION_START_TOKEN,
    encode_text,
    token_id,
)

#: Label of a position without loss.
IGNORE_INDEX = -100

ROLES = ("system", "user", "assistant")
_PLACEHOLDER = re.compile(r"(<image>|<video>)\n?")


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    num_visual_tokens: list[int],
    train_on_prompt: bool = False,
) -> tuple[list[int], list[int]]:
    r"""Tokens and next-token labels of one conversation.

    A turn is `<|im_start|>role\ncontent<|im_end|>\n`. A placeholder `<image>` or `<video>` in a question
    becomes `<|vision_start|>`, one `<|image_pad|>` per visual token, `<|vision_end|>`.

    Args:
        tokenizer: Knows the special tokens (`load_tokenizer`).
        messages: `{"role": ..., "content": ...}` per turn.
        num_visual_tokens: Visual tokens of each image or video, in the order of the placeholders.
        train_on_prompt: Learn questions and turn marks too; visual tokens are never predicted.

    Returns:
        `tokens` and `labels` of the same length. `labels[i]` is `tokens[i + 1]` where that token belongs
        to an answer or ends it (with `train_on_prompt`: where it is text), else -100.

    Raises:
        ValueError: Unknown role, an empty answer, no answer at all, a placeholder in an answer, or another
            number of placeholders than media.
    """
    start = token_id(tokenizer, TURN_START_TOKEN)
    end = token_id(tokenizer, TURN_END_TOKEN)
    newline = encode_text(tokenizer, "\n")
    tokens: list[int] = []
    is_answer: list[bool] = []
    num_placeholders = 0
    for message in messages:
        role, content = message["role"], message["content"]
        _check_turn(role, content)
        if role == "assistant":
            body = encode_text(tokenizer, content)
        else:
            body, used = _expand_media(tokenizer, content, num_visual_tokens[num_placeholders:])
            num_placeholders += used
        header = [start, *encode_text(tokenizer, role), *newline]
        tokens += [*header, *body, end, *newline]
        is_answer += [False] * len(header) + [role == "assistant"] * (len(body) + 1) + [False] * len(newline)
    if num_placeholders != len(num_visual_tokens):
        raise ValueError(
            f"{num_placeholders} <image>/<video> placeholders in the questions but {len(num_visual_tokens)} media; "
            "each image needs one placeholder"
        )
    if not any(is_answer):
        raise ValueError("no assistant turn, so there is nothing to learn; give at least one answer")
    image = token_id(tokenizer, IMAGE_TOKEN)
    is_learned = [token != image for token in tokens] if train_on_prompt else is_answer
    labels = [token if learned else IGNORE_INDEX for token, learned in zip(tokens[1:], is_learned[1:])]
    return tokens, [*labels, IGNORE_INDEX]


def _check_turn(role: str, content: str) -> None:
    if role not in ROLES:
        raise ValueError(f"role {role!r} is unknown; use one of {', '.join(ROLES)}")
    if role == "assistant" and not content:
        raise ValueError("an answer is empty; leave the turn out or give its text")
    if role == "assistant" and _PLACEHOLDER.search(content):
        raise ValueError("an answer holds an <image> or <video> placeholder; media belong into questions")


def _expand_media(
    tokenizer: PreTrainedTokenizerBase, content: str, num_visual_tokens: list[int]
) -> tuple[list[int], int]:
    """Tokens of a question, and how many media its placeholders used up."""
    tokens: list[int] = []
    used = 0
    for piece in _PLACEHOLDER.split(content):
        if piece in ("<image>", "<video>"):
            if used == len(num_visual_tokens):
                raise ValueError(f"placeholder {piece} without a picture; give one image or video per placeholder")
            tokens.append(token_id(tokenizer, VISION_START_TOKEN))
            tokens += [token_id(tokenizer, IMAGE_TOKEN)] * num_visual_tokens[used]
            tokens.append(token_id(tokenizer, VISION_END_TOKEN))
            used += 1
        elif piece:
            tokens += encode_text(tokenizer, piece)
    return tokens, used
