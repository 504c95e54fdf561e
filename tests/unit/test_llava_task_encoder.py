"""The example's task encoder: labels, packing, padding, errors, and the way through Energon's loader."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon import WorkerConfig, get_loader, get_savable_loader, get_train_dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.llava_ov.build_demo_data import prepare
from examples.llava_ov.chat_template import IGNORE_INDEX, render_chat
from examples.llava_ov.collate import best_fit_decreasing, pack_samples, pad_samples
from examples.llava_ov.samples import ChatSample, Conversation, LlavaBatch, LlavaSample
from examples.llava_ov.task_encoder import LlavaTaskEncoder, cook_chat
from examples.llava_ov.tokenizer import IMAGE_TOKEN, encode_text, load_tokenizer, token_id, train_tokenizer
from tests.demo_data import image_file, small_data_set

TOKENIZER = train_tokenizer(["What is this? A cat. Red, not blue. user assistant system"] * 3, 320)
IMAGE_ID = token_id(TOKENIZER, IMAGE_TOKEN)
CAT = [{"role": "user", "content": "<image>\nWhat is this?"}, {"role": "assistant", "content": "A cat."}]
TEXT = [{"role": "user", "content": "Red?"}, {"role": "assistant", "content": "Not blue."}]
PICTURE = image_file(Image.new("RGB", (84, 56), "red"))


def chat(*conversations: Conversation, key: str = "k0") -> ChatSample:
    return ChatSample(__key__=key, __restore_key__=(), conversations=list(conversations))


def cat() -> Conversation:
    return Conversation(messages=CAT, media=[PICTURE])


def text() -> Conversation:
    return Conversation(messages=TEXT, media=[])


def encode(*conversations: Conversation, key: str = "k0", **kwargs: Any) -> LlavaSample:
    return LlavaTaskEncoder(tokenizer=TOKENIZER, **kwargs).encode_sample(chat(*conversations, key=key))


def assert_equal(left: LlavaSample | LlavaBatch, right: LlavaSample | LlavaBatch) -> None:
    """Every field equal, keys included."""
    for name in type(left).__dataclass_fields__:
        ours, theirs = getattr(left, name), getattr(right, name)
        equal = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
        assert equal or name == "__sources__", name


# Chat template


def test_labels_are_the_shifted_answers() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *CAT, {"role": "user", "content": "Red?"}]
    messages.append({"role": "assistant", "content": "Not blue."})
    tokens, labels = render_chat(TOKENIZER, messages, [3])
    assert TOKENIZER.decode(tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>"
        "What is this?<|im_end|>\n"
        "<|im_start|>assistant\nA cat.<|im_end|>\n"
        "<|im_start|>user\nRed?<|im_end|>\n"
        "<|im_start|>assistant\nNot blue.<|im_end|>\n"
    )
    learned = [index for index, label in enumerate(labels) if label != IGNORE_INDEX]
    assert TOKENIZER.decode([labels[index] for index in learned]) == "A cat.<|im_end|>Not blue.<|im_end|>"
    assert all(labels[index] == tokens[index + 1] for index in learned)
    assert len(labels) == len(tokens) and labels[-1] == IGNORE_INDEX


def test_text_that_looks_like_a_special_token_stays_text() -> None:
    messages = [
        {"role": "user", "content": "What does <|image_pad|> mean?"},
        {"role": "assistant", "content": "<|im_end|> ends a turn, <|image_pad|> takes a picture."},
    ]
    tokens, _ = render_chat(TOKENIZER, messages, [])
    assert IMAGE_ID not in tokens
    assert tokens.count(token_id(TOKENIZER, "<|im_end|>")) == 2
    assert messages[1]["content"] in TOKENIZER.decode(tokens)


@pytest.mark.parametrize(
    ("messages", "num_visual_tokens", "message"),
    [
        (CAT, [], "placeholder <image> without a picture"),
        (CAT, [4, 4], "1 <image>/<video> placeholders in the questions but 2 media"),
        (TEXT[:1], [], "no assistant turn"),
        ([*TEXT[:1], {"role": "assistant", "content": ""}], [], "an answer is empty"),
        ([*TEXT[:1], {"role": "assistant", "content": "<image>"}], [4], "an answer holds"),
        ([{"role": "bot", "content": "Hi"}], [], "role 'bot' is unknown"),
    ],
)
def test_odd_conversations_are_errors(messages: list, num_visual_tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_chat(TOKENIZER, messages, num_visual_tokens)


# Tokenizer


@settings(max_examples=40, deadline=None)
@given(st.text())
def test_byte_level_tokenizer_loses_nothing(content: str) -> None:
    assert TOKENIZER.decode(encode_text(TOKENIZER, content)) == content


def test_tokenizer_directory_loads_with_missing_special_tokens_added(tmp_path: Path) -> None:
    plain = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(tmp_path / "foreign")
    foreign = load_tokenizer(tmp_path / "foreign")
    assert len(foreign) == 8 and token_id(foreign, IMAGE_TOKEN) >= 2 and foreign.pad_token_id is not None

    TOKENIZER.save_pretrained(tmp_path / "own")
    own = load_tokenizer(tmp_path / "own")
    assert len(own) == len(TOKENIZER) and own.pad_token_id == TOKENIZER.pad_token_id
    assert render_chat(own, CAT, [4]) == render_chat(TOKENIZER, CAT, [4])
    with pytest.raises(ValueError, match="is not a tokenizer directory"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ValueError, match="vocab_size=100 cannot hold"):
        train_tokenizer(["a"], 100)


# Encoding


def test_encoded_sample_counts_its_visual_tokens() -> None:
    sample = encode(cat())
    assert sample.image_grid_thw.tolist() == [[1, 4, 6]]
    assert sample.pixel_values.shape == (24, 588)
    assert (sample.tokens == IMAGE_ID).sum() == 6
    assert sample.total_len == len(sample.tokens) == len(sample.labels)
    assert sample.cu_lengths is None


def test_text_only_sample_has_no_rows() -> None:
    sample = encode(text())
    assert sample.pixel_values.shape == (0, 588) and sample.pixel_values.dtype == torch.float32
    assert sample.image_grid_thw.shape == (0, 3) and sample.image_grid_thw.dtype == torch.int64


def test_video_takes_tokens_per_frame() -> None:
    messages = [{"role": "user", "content": "<video>\nWhat is this?"}, CAT[1]]
    sample = encode(Conversation(messages=messages, media=[[PICTURE, PICTURE, PICTURE]]))
    assert sample.image_grid_thw.tolist() == [[3, 4, 6]]
    assert (sample.tokens == IMAGE_ID).sum() == 18


def test_errors_name_the_sample() -> None:
    with pytest.raises(ValueError, match="sample bad7: image file of 3 bytes cannot be decoded"):
        encode(Conversation(messages=CAT, media=[b"odd"]), key="bad7")
    length = encode(cat()).total_len
    encode(cat(), seq_length=length)
    with pytest.raises(ValueError, match=f"sample long1 has {length} tokens, more than the limit of {length - 1}"):
        encode(cat(), key="long1", seq_length=length - 1)


def test_cooking_names_what_is_missing() -> None:
    crude = {"__key__": "c1", "__restore_key__": (), "json": b'{"messages": [], "media": ["a.jpg"]}'}
    with pytest.raises(ValueError, match=r"sample c1 cannot be read \(KeyError: 'a.jpg'\); it has the parts"):
        cook_chat(crude)
    for content in (b"{", b"[]", b'{"media": []}', b'{"messages": [3]}'):
        with pytest.raises(ValueError, match="sample c1 cannot be read"):
            cook_chat({**crude, "json": content})


def test_offline_packed_sample_equals_packing_here() -> None:
    pack = {"packed": [{"messages": CAT, "media": ["a.png"]}, {"messages": TEXT}]}
    crude = {"__key__": "p1", "__restore_key__": (), "json": json.dumps(pack).encode(), "a.png": PICTURE}
    sample = LlavaTaskEncoder(tokenizer=TOKENIZER).encode_sample(cook_chat(crude))
    assert sample.__key__ == "p1"
    expected = pack_samples([encode(cat(), key="p1"), encode(text(), key="p1")])
    expected.__key__ = "p1"
    assert_equal(sample, expected)


# Packing and padding


@given(st.lists(st.integers(1, 120), max_size=40), st.integers(1, 100))
def test_packs_hold_everything_once_within_capacity(lengths: list[int], capacity: int) -> None:
    groups = best_fit_decreasing(lengths, capacity)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in group) for group in groups]
    assert all(total <= capacity or len(group) == 1 for total, group in zip(sums, groups))
    # Two groups that would fit into one mean that best fit missed a place.
    fitting = sorted(total for total in sums if total <= capacity)
    assert len(fitting) < 2 or fitting[0] + fitting[1] > capacity


def test_best_fit_takes_the_fullest_group_with_room() -> None:
    assert best_fit_decreasing([50, 60, 40, 30, 70], 100) == [[4, 3], [1, 2], [0]]


def test_pack_keeps_bounds_and_targets_apart() -> None:
    parts = [encode(cat(), key="a"), encode(text(), key="b"), encode(cat(), key="c")]
    pack = pack_samples([pack_samples(parts[:2]), parts[2]])
    ends = np.cumsum([part.total_len for part in parts]).tolist()
    assert pack.cu_lengths.tolist() == [0, *ends] and pack.cu_lengths.dtype == torch.int32
    assert pack.total_len == ends[-1] == len(pack.tokens)
    assert pack.__key__ == "a,b,c"
    for part, start, end in zip(parts, [0, *ends], ends):
        assert torch.equal(pack.tokens[start:end], part.tokens)
        assert torch.equal(pack.labels[start:end], part.labels)
        # The last position would have to predict the next sample's first token.
        assert pack.labels[end - 1] == IGNORE_INDEX
    assert torch.equal(pack.pixel_values, torch.cat([part.pixel_values for part in parts]))


def test_batch_pads_right_and_keeps_images_in_order() -> None:
    short, long = encode(text(), key="a"), encode(cat(), key="b")
    batch = pad_samples([short, long], TOKENIZER.pad_token_id)
    assert batch.tokens.shape == batch.labels.shape == (2, long.total_len)
    assert batch.lengths.tolist() == [short.total_len, long.total_len]
    assert batch.num_images.tolist() == [0, 1]
    assert torch.equal(batch.tokens[0, : short.total_len], short.tokens)
    assert (batch.tokens[0, short.total_len :] == TOKENIZER.pad_token_id).all()
    assert (batch.labels[0, short.total_len :] == IGNORE_INDEX).all()
    assert torch.equal(batch.pixel_values, long.pixel_values)
    assert batch.__key__ == ["a", "b"] and batch.cu_lengths is None

    pack = pack_samples([short, long])
    assert pad_samples([pack], 0).cu_lengths.tolist() == pack.cu_lengths.tolist()
    with pytest.raises(ValueError, match="micro batch size 1"):
        pad_samples([pack, short], 0)


def test_packing_needs_a_sequence_length() -> None:
    with pytest.raises(ValueError, match="seq_length"):
        LlavaTaskEncoder(tokenizer=TOKENIZER).select_samples_to_pack([encode(text())])


# With Energon


class Front:
    """Stands for a mixin that takes positional arguments and hands the rest on."""

    def __init__(self, config: object = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = config

    def build_batch(self, dataset: Any, **kwargs: Any) -> Any:
        self.was_built = True
        return super().build_batch(dataset, **kwargs)


class MixedEncoder(Front, LlavaTaskEncoder):
    """The class order that users write."""


def test_mixin_in_front_is_initialised_and_called() -> None:
    encoder = MixedEncoder("levers", tokenizer=TOKENIZER, seq_length=77, batch_type=None)
    assert (encoder.config, encoder.seq_length) == ("levers", 77)
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    get_train_dataset(
        small_data_set(),
        task_encoder=encoder,
        worker_config=worker_config,
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
    )
    assert encoder.was_built


@pytest.mark.parametrize("packing_buffer_size", [None, 12])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_restores_every_batch_from_its_key(num_workers: int, packing_buffer_size: int | None) -> None:
    path = small_data_set()
    dataset = get_train_dataset(
        path,
        task_encoder=LlavaTaskEncoder(tokenizer=load_tokenizer(path / "tokenizer"), seq_length=1200),
        worker_config=WorkerConfig(rank=0, world_size=2, num_workers=num_workers),
        batch_size=2 if packing_buffer_size is None else 1,
        shuffle_buffer_size=10,
        max_samples_per_sequence=8,
        packing_buffer_size=packing_buffer_size,
    )
    assert dataset.can_restore_sample()
    loader = get_savable_loader(dataset)
    batches = [batch for _, batch in zip(range(4), loader)]
    for batch in batches:
        assert isinstance(batch, LlavaBatch)
        assert (batch.cu_lengths is None) == (packing_buffer_size is None)
        assert batch.image_grid_thw.prod(dim=1).sum() == len(batch.pixel_values)
        assert_equal(loader.restore_sample(batch.__restore_key__), batch)
    if num_workers:
        loader._iterator._shutdown_workers()  # else Energon waits five seconds for each


def test_unusable_samples_reach_the_error_handler_by_name(tmp_path: Path) -> None:
    png = bytearray(image_file(Image.new("RGB", (64, 64))))
    png[png.index(b"IDAT") : png.index(b"IDAT") + 4] = b"\x00\x00\x00\x00"
    jpeg = image_file(Image.effect_noise((200, 200), 90), "JPEG")
    words = [TEXT[0], {"role": "assistant", "content": "Not blue. " * 100}]
    samples: dict[str, tuple[list[dict[str, str]], dict[str, bytes]]] = {
        "good0": (CAT, {"a.png": PICTURE}),
        "truncated": (CAT, {"a.jpg": jpeg[:-2000]}),
        "damaged": (CAT, {"a.png": bytes(png)}),
        "flat": (CAT, {"a.png": image_file(Image.new("L", (2000, 4)))}),
        "long": (words, {}),
        "good1": (TEXT, {}),
    }
    with webdataset.ShardWriter(str(tmp_path / "train-%06d.tar"), encoder=False, verbose=0) as shards:
        for key, (messages, parts) in samples.items():
            content = json.dumps({"messages": messages, "media": list(parts)}).encode()
            shards.write({"__key__": key, "json": content, **parts})
    prepare(tmp_path)

    failed: list[str] = []
    dataset = get_train_dataset(
        tmp_path,
        task_encoder=LlavaTaskEncoder(tokenizer=TOKENIZER, seq_length=100),
        worker_config=WorkerConfig(
            rank=0,
            world_size=1,
            num_workers=0,
            global_error_handler=lambda error, sample, sources: failed.append(str(error)),
        ),
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        repeat=False,
    )
    assert sorted(batch.__key__[0] for batch in get_loader(dataset)) == ["good0", "good1"]
    assert sorted(message.split()[1].rstrip(":") for message in failed) == ["damaged", "flat", "long", "truncated"]


def test_loss_positions_are_a_share_of_the_text() -> None:
    """In the demo data every sample has something to learn, and no image token is a target."""
    path = small_data_set()
    tokenizer = load_tokenizer(path / "tokenizer")
    dataset = get_train_dataset(
        path,
        task_encoder=LlavaTaskEncoder(tokenizer=tokenizer),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        repeat=False,
    )
    image_id = token_id(tokenizer, IMAGE_TOKEN)
    num_samples = 0
    for batch in get_loader(dataset):
        num_samples += 1
        learned = batch.labels[batch.labels != IGNORE_INDEX]
        assert 0 < len(learned) < batch.lengths[0] and image_id not in learned
        assert (batch.tokens == image_id).sum() * 4 == len(batch.pixel_values)
    assert num_samples == 96 - math.ceil(96 / 16)
