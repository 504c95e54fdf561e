"""Codec: what is split and merged again is the same, for every layout of batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_balance import BatchCodec, DefaultCodec, SampleSize, codec_for, register_codec
from data_balance.fields import split_restore_key


@dataclasses.dataclass
class LlavaLikeBatch:
    """The fields of the example's batch."""

    __key__: list[str]
    __restore_key__: tuple
    tokens: torch.Tensor
    labels: torch.Tensor
    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor
    lengths: torch.Tensor
    num_images: torch.Tensor
    cu_lengths: torch.Tensor | None = None
    odb_info: torch.Tensor | None = None
    worker_counters: torch.Tensor | None = None
    __subflavors__: list | None = None


def llava_batch(lengths: list[int], grids: list[list[list[int]]], seed: int = 0) -> LlavaLikeBatch:
    generator = torch.Generator().manual_seed(seed)
    size, width = len(lengths), max(lengths)
    tokens = torch.zeros(size, width, dtype=torch.int64)
    labels = torch.full((size, width), -100)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(1, 99, (length,), generator=generator)
        labels[row, :length] = torch.randint(1, 99, (length,), generator=generator)
    grid = torch.tensor([g for sample in grids for g in sample], dtype=torch.int64).reshape(-1, 3)
    return LlavaLikeBatch(
        __key__=[f"sample{i}" for i in range(size)],
        __restore_key__=("EpochizeDataset", 0, "BatchDataset", 7, *(("Webdataset", seed, i) for i in range(size))),
        tokens=tokens,
        labels=labels,
        pixel_values=torch.randn(int(grid.prod(1).sum()), 12, generator=generator),
        image_grid_thw=grid,
        lengths=torch.tensor(lengths),
        num_images=torch.tensor([len(sample) for sample in grids]),
        odb_info=torch.tensor([1, 2]),
    )


def assert_same(left: Any, right: Any) -> None:
    for name, value in vars(left).items():
        other = getattr(right, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(value, other), name
        else:
            assert value == other, name


GRID = st.tuples(st.integers(1, 2), st.sampled_from([2, 4]), st.sampled_from([2, 6])).map(list)
SAMPLE = st.tuples(st.integers(1, 30), st.lists(GRID, max_size=3))


@settings(max_examples=60, deadline=None)
@given(samples=st.lists(SAMPLE, min_size=1, max_size=5), cut=st.integers(0, 5))
def test_samples_of_two_batches_regroup_without_loss(samples: list, cut: int) -> None:
    codec = DefaultCodec()
    batch = llava_batch([length for length, _ in samples], [grids for _, grids in samples])
    parts = codec.split(batch)
    assert len(parts) == len(samples)
    whole = codec.merge(parts, batch)
    assert_same(dataclasses.replace(batch, odb_info=None, __restore_key__=whole.__restore_key__), whole)
    assert whole.__restore_key__ == ("DataBalance", *batch.__restore_key__[-len(samples) :])
    # Cut anywhere, merged apart, split and merged again: still the same.
    groups = [group for group in (parts[:cut], parts[cut:]) if group]
    again = [sample for group in groups for sample in codec.split(codec.merge(group, batch))]
    assert_same(codec.merge(again, batch), whole)


def test_a_loaders_counters_stay_on_their_rank() -> None:
    codec = DefaultCodec()
    mine, other = llava_batch([3] * 6, [[]] * 6), llava_batch([4], [[]], seed=1)
    mine.worker_counters, other.worker_counters = torch.arange(6), torch.arange(6) * 10
    merged = codec.merge(codec.split(other) + codec.split(mine)[:2], mine)
    assert torch.equal(merged.worker_counters, mine.worker_counters) and len(merged.tokens) == 3
    as_dict = {"tokens": torch.ones(1, 2), "worker_counters": torch.arange(6)}
    assert torch.equal(
        codec.merge(codec.split({"tokens": torch.ones(1, 3)}), as_dict)["worker_counters"], torch.arange(6)
    )


def test_sizes_of_a_sample() -> None:
    batch = llava_batch([5, 9], [[[1, 2, 2], [1, 4, 2]], [[3, 2, 2]]])
    first, second = DefaultCodec().split(batch)
    assert DefaultCodec().measure(first, "image") == SampleSize(
        5, 25, 12, 16 + 64, first_bytes := 5 * 16 + 12 * 48 + 64
    )
    assert first_bytes == 720
    assert DefaultCodec().measure(second, "both").patch_squares == 3 * 16
    assert DefaultCodec().measure(second, "video").num_patches == 0


def test_video_twins_text_only_and_dicts_without_images() -> None:
    codec = DefaultCodec()
    with_video = {
        "input_ids": torch.tensor([[1, 2, 3, 4]]),
        "labels": torch.tensor([[1, 2, 3, 4]]),
        "pixel_values_videos": torch.arange(16.0).reshape(8, 2),
        "video_grid_thw": torch.tensor([[2, 2, 2]]),
        "second_per_grid_ts": torch.tensor([0.5]),
    }
    with_image = {
        "input_ids": torch.tensor([[5, 6]]),
        "labels": torch.tensor([[5, 6]]),
        "imgs": torch.ones(4, 2),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }
    text = {"input_ids": torch.tensor([[7, 8, 9]]), "labels": torch.tensor([[7, 8, 9]])}
    samples = [codec.split(batch)[0] for batch in (with_video, with_image, text)]
    merged = codec.merge(samples, text)
    assert merged["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0]]
    assert merged["labels"][1].tolist() == [5, 6, -100, -100]
    assert torch.equal(merged["pixel_values_videos"], with_video["pixel_values_videos"])
    assert torch.equal(merged["imgs"], with_image["imgs"]) and merged["second_per_grid_ts"].tolist() == [0.5]
    assert codec.measure(samples[0], "video").patch_squares == 2 * 16
    assert codec.measure(samples[0], "image").num_patches == 0
    assert "imgs" not in codec.merge(samples[2:], text)


def test_images_are_found_by_their_tokens() -> None:
    image = 99
    batch = {
        "tokens": torch.tensor([[1, image, image, 2], [3, 4, 5, 6], [image, 1, 1, 1]]),
        "pixel_values": torch.arange(12.0)[:, None],
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2], [1, 2, 2]]),
    }
    samples = DefaultCodec(image_token_id=image).split(batch)
    assert [len(s["image_grid_thw"]) for s in samples] == [2, 0, 1]
    assert samples[2]["pixel_values"].flatten().tolist() == [8, 9, 10, 11]
    with pytest.raises(ValueError, match="num_images"):
        DefaultCodec().split(batch)
    with pytest.raises(ValueError, match="another sample's text"):
        DefaultCodec(image_token_id=98).split(batch)


def test_masks_positions_and_rope_positions_are_cut_and_padded() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    batch = {
        "tokens": torch.arange(8).reshape(2, 4),
        "attention_mask": mask,
        "loss_mask": torch.ones(2, 4),
        "position_ids": torch.arange(24).reshape(3, 2, 4),
        "dense": torch.ones(2, 1, 4, 4, dtype=torch.bool).triu(1),
        "features": torch.randn(2, 4, 5),
        "weight": torch.tensor([0.5, 2.0]),
        "kind": "chat",
    }
    codec = DefaultCodec()
    first, second = codec.split(batch)
    assert first["tokens"].tolist() == [0, 1, 2] and first["features"].shape == (3, 5)
    alone = codec.merge([first], batch)
    assert alone["position_ids"].shape == (3, 1, 3) and alone["dense"].shape == (1, 1, 3, 3)
    both = codec.merge([second, first], batch)
    assert both["position_ids"][:, 1, 3].tolist() == [0, 0, 0]
    assert both["dense"][1, 0, :, 3].all() and both["weight"].tolist() == [2.0, 0.5] and both["kind"] == "chat"
    with pytest.raises(ValueError, match="'kind' differs"):
        codec.merge([first, {**second, "kind": "caption"}], batch)


def packed_batch(segments: list[int], seed: int) -> LlavaLikeBatch:
    batch = llava_batch([sum(segments)], [[[1, 2, 2]]], seed)
    return dataclasses.replace(batch, cu_lengths=torch.tensor([0, *segments]).cumsum(0).to(torch.int32))


def test_packed_samples_stay_packed_and_join_end_to_end() -> None:
    codec = DefaultCodec()
    one, two = packed_batch([3, 4], 0), packed_batch([5], 1)
    samples = codec.split(one) + codec.split(two)
    assert codec.measure(samples[0], "image").token_squares == 9 + 16
    assert not codec.pads(one)
    merged = codec.merge(samples, one)
    assert merged.cu_lengths.tolist() == [0, 3, 7, 12] and merged.cu_lengths.dtype == torch.int32
    assert merged.tokens.tolist() == [one.tokens[0].tolist() + two.tokens[0].tolist()]
    assert merged.lengths.tolist() == [12] and merged.num_images.tolist() == [2]
    assert torch.equal(codec.merge(samples[:1], one).cu_lengths, one.cu_lengths)


def test_unpacked_samples_are_packed_on_request() -> None:
    batch = llava_batch([3, 5], [[], [[1, 2, 2]]])
    codec = DefaultCodec(pack_samples=True, pad_to_multiple=4)
    merged = codec.merge(codec.split(batch), batch)
    assert merged.tokens.shape == (1, 8) and merged.cu_lengths.tolist() == [0, 3, 8]
    wider = codec.merge(codec.split(llava_batch([3, 3], [[], []])), batch)
    assert wider.tokens.shape == (1, 8) and wider.cu_lengths.tolist() == [0, 3, 6, 8]
    assert wider.labels[0, 6:].tolist() == [-100, -100]
    assert DefaultCodec().pads(batch) and not codec.pads(batch)


def test_idle_samples_have_no_weight_and_stages_without_encoder_no_pixels() -> None:
    codec = DefaultCodec()
    batch = llava_batch([4], [[[1, 2, 2]]])
    (sample,) = codec.split(batch)
    idle = codec.merge([codec.idle(sample)], batch)
    assert (idle.labels == -100).all() and torch.equal(idle.tokens, batch.tokens)
    light = codec.merge([codec.without_pixels(sample)], batch)
    assert len(light.pixel_values) == 0 and len(light.image_grid_thw) == 1
    (weightless,) = codec.split({"tokens": torch.tensor([[1, 2]])})
    with pytest.raises(ValueError, match="neither labels nor"):
        codec.idle(weightless)


def test_restore_keys_of_samples() -> None:
    keys = (("Webdataset", 3), ("Webdataset", 4))
    assert split_restore_key(("EpochizeDataset", 0, "BatchDataset", 1, *keys), 2) == list(keys)
    assert split_restore_key(("DataBalance", *keys), 2) == list(keys)
    assert split_restore_key("opaque", 2) == [("opaque", 0), ("opaque", 1)]


@pytest.mark.parametrize(
    "batch, words",
    [
        ({"x": torch.ones(2, 3)}, "no tokens"),
        ({"tokens": torch.ones(2, 3), "pixel_values": torch.ones(4, 2)}, "no image_grid_thw"),
        ({"tokens": torch.ones(2, 3), "odd": torch.ones(7)}, "'odd' has shape"),
        ({"tokens": torch.ones(2, 3), "cu_lengths": torch.tensor([0, 3])}, "one row"),
        (
            {
                "tokens": torch.ones(1, 3),
                "pixel_values": torch.ones(4, 2),
                "image_grid_thw": torch.tensor([[1, 2, 2]]),
                "num_images": torch.tensor([2]),
            },
            "num_images is",
        ),
    ],
)
def test_batches_that_cannot_be_split_are_refused(batch: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DefaultCodec().split(batch)


def test_fields_missing_in_some_samples_are_refused() -> None:
    codec = DefaultCodec()
    one = codec.split({"tokens": torch.ones(1, 3), "weight": torch.ones(1)})
    two = codec.split({"tokens": torch.ones(1, 3)})
    with pytest.raises(ValueError, match="'weight' is missing in 1 of 2"):
        codec.merge(one + two, {"tokens": None})


def test_registry_prefers_the_nearest_base() -> None:
    class Plain:
        pass

    class Derived(Plain):
        pass

    class Own(DefaultCodec):
        pass

    with pytest.raises(ValueError, match="register_codec"):
        codec_for(Plain())
    codec: BatchCodec = Own()
    register_codec(Plain, codec)
    assert codec_for(Derived()) is codec
    assert isinstance(codec_for({}), DefaultCodec)
