"""Energon task encoder: crude WebDataset samples to LlavaSample to LlavaBatch."""

from __future__ import annotations

import json
from typing import Any

import torch
from megatron.energon import Cooker, DefaultTaskEncoder, basic_sample_keys, stateless
from megatron.energon.flavors import CrudeSample
from transformers import PreTrainedTokenizerBase

from examples.llava_ov.chat_template import render_chat
from examples.llava_ov.collate import best_fit_decreasing, pack_samples, pad_samples
from examples.llava_ov.image_processing import ImageConfig, process_frames
from examples.llava_ov.samples import ChatSample, Conversation, LlavaBatch, LlavaSample


@stateless
def cook_chat(sample: CrudeSample) -> ChatSample:
    """Reads the `json` part of a sample and collects the image files that it names.

    The part is `{"messages": [{"role", "content"}, ...], "media": [...]}`; an entry of `media` is the name
    of one image part of the sample, or a list of names, the frames of a video. A sample that was packed
    offline is `{"packed": [...]}` with one such dictionary per sub-sequence.

    Raises:
        ValueError: A part is missing, or the json has another form; the message names the sample.
    """
    key = sample["__key__"]
    try:
        content = json.loads(sample["json"])
        parts = content.get("packed", [content])
        conversations = [_read_conversation(sample, part) for part in parts]
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        present = sorted(name for name in sample if not name.startswith("__"))
        raise ValueError(
            f"sample {key} cannot be read ({type(error).__name__}: {error}); it has the parts {present}, and "
            "its json must hold messages and media"
        ) from error
    return ChatSample(**basic_sample_keys(sample), conversations=conversations)


def _read_conversation(sample: CrudeSample, part: dict[str, Any]) -> Conversation:
    media = [
        sample[name] if isinstance(name, str) else [sample[frame] for frame in name] for name in part.get("media", [])
    ]
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in part["messages"]]
    return Conversation(messages=messages, media=media)


class LlavaTaskEncoder(DefaultTaskEncoder):
    """Encodes chats with pictures at native resolution.

    Put a mixin that overrides `build_batch` in front of it; keyword arguments that are not its own go on to
    Energon's `DefaultTaskEncoder`.
    """

    cookers = [Cooker(cook_chat)]
    #: Image files stay bytes until `encode_sample`, where a broken one can be named.
    decoder = None

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        seq_length: int | None = None,
        image_config: ImageConfig | None = None,
        train_on_prompt: bool = False,
        pad_to_multiple_of: int = 1,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            tokenizer: From `examples.llava_ov.tokenizer.load_tokenizer`.
            seq_length: Most tokens of a sample, and capacity of a pack; None sets no limit (and no packing).
            image_config: Patch geometry and picture size bounds.
            train_on_prompt: Learn the questions too, see `render_chat`.
            pad_to_multiple_of: Lengths of micro batches are multiples of it, see `pad_samples`.
            kwargs: For Energon's task encoder.
        """
        super().__init__(**kwargs)
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.image_config = image_config or ImageConfig()
        self.train_on_prompt = train_on_prompt
        self.pad_to_multiple_of = pad_to_multiple_of

    @stateless
    def encode_sample(self, sample: ChatSample) -> LlavaSample:
        """Pictures to patches, text to tokens and labels.

        Raises:
            ValueError: The sample cannot be used as it is (damaged picture, odd turns, too long). The
                message names it, and Energon's error handler decides what follows.
        """
        try:
            encoded = [self._encode_conversation(sample, chat) for chat in sample.conversations]
        except ValueError as error:
            raise ValueError(f"sample {sample.__key__}: {error}") from error
        result = encoded[0] if len(encoded) == 1 else LlavaSample.extend(pack_samples(encoded), __key__=sample.__key__)
        if self.seq_length is not None and result.total_len > self.seq_length:
            raise ValueError(
                f"sample {sample.__key__} has {result.total_len} tokens, more than the limit of {self.seq_length}; "
                "raise the sequence length, lower the largest picture size, or leave the sample out"
            )
        return result

    def _encode_conversation(self, sample: ChatSample, chat: Conversation) -> LlavaSample:
        pixel_values = [torch.zeros(0, self.image_config.patch_dim)]
        grids = []
        for media in chat.media:
            patches, grid = process_frames(media if isinstance(media, list) else [media], self.image_config)
            pixel_values.append(patches)
            grids.append(grid)
        num_visual_tokens = [t * h * w // self.image_config.merge_size**2 for t, h, w in grids]
        tokens, labels = render_chat(self.tokenizer, chat.messages, num_visual_tokens, self.train_on_prompt)
        return LlavaSample.derive_from(
            sample,
            tokens=torch.tensor(tokens),
            labels=torch.tensor(labels),
            pixel_values=torch.cat(pixel_values),
            image_grid_thw=torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
            total_len=len(tokens),
        )

    @stateless
    def select_samples_to_pack(self, samples: list[LlavaSample]) -> list[list[LlavaSample]]:
        """Splits a buffer into packs of at most `seq_length` tokens (best fit, longest first).

        Raises:
            ValueError: `seq_length` is not set.
        """
        if self.seq_length is None:
            raise ValueError("packing is on but seq_length is None, so packs have no size; set seq_length")
        packs = best_fit_decreasing([sample.total_len for sample in samples], self.seq_length)
        return [[samples[index] for index in pack] for pack in packs]

    @stateless
    def pack_selected_samples(self, samples: list[LlavaSample]) -> LlavaSample:
        """One packed sample with `cu_lengths`."""
        return pack_samples(samples)

    @stateless
    def batch(self, samples: list[LlavaSample]) -> LlavaBatch:
        """One padded micro batch."""
        return pad_samples(samples, self.tokenizer.pad_token_id, self.pad_to_multiple_of)
