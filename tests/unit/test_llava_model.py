"""The LLaVA-OneVision model on one rank: exactness of its parts, independence of samples, freezing, sizes."""

# ruff: noqa: E402 - the shim goes before megatron.core

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples.llava_ov import cpu_shim
from examples.llava_ov.config import LlavaOnevisionConfig, get_model_config

cpu_shim.install()

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from examples.llava_ov.attention import SegmentedAttention
from examples.llava_ov.model import LlavaOnevision, build_model, packed_segments, set_trainable_modules
from examples.llava_ov.vision import patch_positions, vision_transformer_config

pytestmark = pytest.mark.megatron_in_process

IMAGE_TOKEN = 5


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    cpu_shim.install_after_import()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def small_config(**runtime: object) -> LlavaOnevisionConfig:
    config = get_model_config("tiny").with_vocab(200, IMAGE_TOKEN).with_runtime(params_dtype=torch.float64, **runtime)
    return dataclasses.replace(
        config,
        language=dataclasses.replace(config.language, num_layers=2),
        vision=dataclasses.replace(config.vision, num_layers=2),
    )


@pytest.fixture(scope="module")
def model() -> LlavaOnevision:
    return build_model(small_config())


def pixels(seed: int, grids: list[list[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(t * h * w for t, h, w in grids), 588, generator=generator, dtype=torch.float64)


def sample(seed: int, grids: list[list[int]], num_text: int) -> dict[str, Tensor]:
    """One sample: a text token, the image tokens, more text; labels everywhere on text."""
    generator = torch.Generator().manual_seed(seed)
    num_image_tokens = sum(t * h * w // 4 for t, h, w in grids)
    tokens = torch.randint(10, 200, (num_image_tokens + num_text,), generator=generator)
    tokens[1 : 1 + num_image_tokens] = IMAGE_TOKEN
    labels = torch.randint(10, 200, tokens.shape, generator=generator)
    labels[: num_image_tokens + 1] = -100
    return {
        "images": pixels(seed, grids),
        "grids": torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        "tokens": tokens,
        "labels": labels,
    }


def losses(model: LlavaOnevision, samples: list[dict[str, Tensor]], pack: bool = False) -> list[Tensor]:
    """Losses of each sample's positions, from one padded batch or one packed sequence."""
    lengths = [len(s["tokens"]) for s in samples]
    images, grids = (torch.cat([s[key] for s in samples]) for key in ("images", "grids"))
    if pack:
        tokens, labels = (torch.cat([s[key] for s in samples])[None] for key in ("tokens", "labels"))
        cu_lengths = torch.tensor([0, *lengths]).cumsum(0)
        output = model(images, grids, tokens, None, None, labels, packed_segments(cu_lengths, sum(lengths)))
        return list(output[0].split(lengths))
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([s["tokens"] for s in samples], batch_first=True)
    labels = pad([s["labels"] for s in samples], batch_first=True, padding_value=-100)
    output = model(images, grids, tokens, None, None, labels)
    return [row[:length] for row, length in zip(output, lengths)]


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> bool:
    # The losses themselves are float32 (Megatron's cross-entropy), everything before them float64.
    return actual.shape == expected.shape and bool((actual - expected).abs().max() <= tolerance)


# --- attention ---------------------------------------------------------------------------------------------------


def dense_attention(query: Tensor, key: Tensor, value: Tensor, bounds: list[int], causal: bool) -> Tensor:
    """Block-diagonal softmax attention written out, [tokens, heads, dim] -> [tokens, heads*dim]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    segment = torch.bucketize(torch.arange(query.shape[0]), torch.tensor(bounds[1:-1]), right=True)
    allowed = segment[:, None] == segment[None]
    if causal:
        allowed &= torch.ones_like(allowed).tril()
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    causal=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_segmented_attention_is_block_diagonal(lengths: list[int], causal: bool, kv_heads: int) -> None:
    mask_type = AttnMaskType.causal if causal else AttnMaskType.no_mask
    attention = SegmentedAttention(vision_transformer_config(small_config()), 1, mask_type, "self")
    generator = torch.Generator().manual_seed(sum(lengths))
    query, key, value = (
        torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64)
        for heads in (4, kv_heads, kv_heads)
    )
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    expected = dense_attention(query, key, value, cu_seqlens.tolist(), causal)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    assert close(attention(query, key, value, None, packed_seq_params=packed), expected, 1e-12)
    if len(lengths) == 1:
        batched = attention(*(x[:, None].expand(-1, 2, -1, -1) for x in (query, key, value)), None)
        assert close(batched[:, 0], expected, 1e-12)
        assert close(batched[:, 1], expected, 1e-12)


def test_attention_refuses_a_mask() -> None:
    attention = SegmentedAttention(vision_transformer_config(small_config()), 1, AttnMaskType.causal, "self")
    x = torch.zeros(2, 1, 1, 4)
    with pytest.raises(ValueError, match="would ignore them"):
        attention(x, x, x, torch.zeros(2, 2, dtype=torch.bool))


# --- vision ------------------------------------------------------------------------------------------------------


def test_patch_positions_go_square_by_square() -> None:
    expected = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert [tuple(p) for p in patch_positions(2, 4, 2).tolist()] == expected
    # The second row of squares follows the first.
    assert patch_positions(4, 2, 2).tolist()[4:] == [[2, 0], [2, 1], [3, 0], [3, 1]]


def test_an_image_does_not_depend_on_its_neighbours(model: LlavaOnevision) -> None:
    grids = [[1, 4, 6], [1, 2, 2], [2, 4, 2]]
    rows = pixels(0, grids).requires_grad_()
    tokens = model.encode_images(rows, torch.tensor(grids))
    assert tokens.shape == (6 + 1 + 4, model.config.hidden_size)
    alone = [model.encode_images(part, torch.tensor([grid])) for part, grid in zip(rows.split([24, 4, 16]), grids)]
    assert close(tokens, torch.cat(alone), 1e-12)
    # The gradient of one image's tokens reaches that image's pixels and no others.
    (gradient,) = torch.autograd.grad(tokens[6:7].sum(), rows)
    assert gradient[24:28].abs().min() > 0
    assert not gradient[:24].any()
    assert not gradient[28:].any()


def test_the_order_of_images_is_kept(model: LlavaOnevision) -> None:
    a, b = pixels(1, [[1, 4, 2]]), pixels(2, [[1, 2, 6]])
    forward = model.encode_images(torch.cat([a, b]), torch.tensor([[1, 4, 2], [1, 2, 6]]))
    backward = model.encode_images(torch.cat([b, a]), torch.tensor([[1, 2, 6], [1, 4, 2]]))
    assert close(forward, torch.cat([backward[3:], backward[:3]]), 1e-12)


def test_video_frames_attend_within_the_frame(model: LlavaOnevision) -> None:
    frames = pixels(3, [[3, 4, 4]])
    video = model.encode_images(frames, torch.tensor([[3, 4, 4]]))
    images = model.encode_images(frames, torch.tensor([[1, 4, 4]] * 3))
    assert torch.equal(video, images)


def test_rotary_positions_matter(model: LlavaOnevision) -> None:
    rows = pixels(4, [[1, 4, 8]])
    wide, tall = (model.encode_images(rows, torch.tensor([grid])) for grid in ([1, 4, 8], [1, 8, 4]))
    assert not close(wide, tall, 1e-6)
    angles = model.vision_model.rotary_angles([[1, 2, 4]])
    row, column = angles.chunk(2, dim=-1)
    assert torch.equal(row[:, 0], torch.tensor([0.0, 0, 1, 1, 0, 0, 1, 1]))
    assert torch.equal(column[:, 0], torch.tensor([0.0, 1, 0, 1, 2, 3, 2, 3]))
    assert (row[2] / row[2, 0]).tolist() == pytest.approx([10_000 ** (-i / 8) for i in range(8)])


@pytest.mark.parametrize(
    ("grid", "num_patches", "message"),
    [
        ([1, 3, 2], 6, "cannot be merged"),
        ([0, 2, 2], 0, "cannot be merged"),
        ([1, 2, 2], 8, "describes 4 patches .* holds 8"),
    ],
)
def test_bad_grids(model: LlavaOnevision, grid: list[int], num_patches: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.encode_images(torch.zeros(num_patches, 588), torch.tensor([grid]))


# --- samples in batches ------------------------------------------------------------------------------------------


SAMPLES = [sample(10, [[1, 4, 4]], 9), sample(11, [], 14), sample(12, [[1, 2, 2], [2, 2, 4]], 6)]


@pytest.mark.parametrize("pack", [False, True])
def test_a_sample_does_not_depend_on_its_batch(model: LlavaOnevision, pack: bool) -> None:
    for together, alone in zip(losses(model, SAMPLES, pack), SAMPLES):
        assert close(together, losses(model, [alone])[0])


@pytest.mark.parametrize("pack", [False, True])
def test_changing_a_neighbour_changes_nothing(model: LlavaOnevision, pack: bool) -> None:
    changed = dict(SAMPLES[0], tokens=SAMPLES[0]["tokens"].clone(), images=SAMPLES[0]["images"] + 1)
    changed["tokens"][-5:] = 123
    before, after = losses(model, SAMPLES, pack), losses(model, [changed, *SAMPLES[1:]], pack)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])


def test_padding_has_no_loss_and_no_effect(model: LlavaOnevision) -> None:
    first = SAMPLES[0]
    tokens = torch.cat([first["tokens"], torch.full((7,), 50)])[None]
    labels = torch.cat([first["labels"], torch.full((7,), -100)])[None]
    padded = model(first["images"], first["grids"], tokens, None, None, labels)[0]
    assert close(padded[:-7], losses(model, [first])[0])
    assert not padded[-7:].any()
    cu_lengths = torch.tensor([0, len(first["tokens"])])
    segments = packed_segments(cu_lengths, tokens.shape[1])
    assert segments is not None
    assert segments.cu_seqlens_q.tolist() == [0, 13, 20]
    packed = model(first["images"], first["grids"], tokens, None, None, labels, segments)[0]
    assert close(packed[:-7], losses(model, [first])[0])


def test_labels_of_minus_100_have_no_loss_and_no_gradient(model: LlavaOnevision) -> None:
    first = SAMPLES[0]
    (loss,) = losses(model, [first])
    ignored = first["labels"] == -100
    assert not loss[ignored].any()
    assert loss[~ignored].min() > 0
    model.zero_grad()
    (loss[ignored].sum() + 0 * loss.sum()).backward()
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_text_only_batch_reaches_every_parameter(model: LlavaOnevision) -> None:
    text = SAMPLES[1]
    model.zero_grad()
    with_empty = losses(model, [text])[0]
    with_none = model(None, None, text["tokens"][None], None, None, text["labels"][None])[0]
    assert torch.equal(with_empty, with_none)
    with_none.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() == name.startswith("language_model"), name


def test_image_tokens_must_match(model: LlavaOnevision) -> None:
    first = SAMPLES[0]
    tokens = first["tokens"].clone()
    tokens[1] = 50
    with pytest.raises(ValueError, match=r"3 image tokens .* but 4 visual tokens"):
        model(first["images"], first["grids"], tokens[None], None, None)
    with pytest.raises(ValueError, match=r"4 image tokens .* but 0 visual tokens"):
        model(None, None, first["tokens"][None], None, None)
    with pytest.raises(ValueError, match="attention_mask is given"):
        model(None, None, tokens[None], None, torch.ones(1, 1, 2, 2, dtype=torch.bool))


# --- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
)
def test_recomputation_changes_nothing(model: LlavaOnevision, recompute: dict[str, object]) -> None:
    recomputed = build_model(small_config(**recompute))
    for other in (model, recomputed):
        other.zero_grad()
        torch.cat(losses(other, SAMPLES, pack=True)).sum().backward()
    for (name, parameter), expected in zip(recomputed.named_parameters(), model.parameters()):
        assert close(parameter.grad, expected.grad, 1e-12), name


@pytest.mark.parametrize(
    "names", [["adapter"], ["language_model"], ["vision_model"], ["adapter", "vision_model"], ["all"]]
)
def test_only_trainable_modules_get_gradients(names: list[str]) -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model = build_model(small_config(**recompute))
    set_trainable_modules(model, names)
    torch.cat(losses(model, SAMPLES)).sum().backward()
    for name, parameter in model.named_parameters():
        trained = "all" in names or name.split(".")[0] in names
        assert (parameter.grad is not None and bool(parameter.grad.any())) == trained, name
    set_trainable_modules(model, ["all"])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_unknown_trainable_modules(model: LlavaOnevision) -> None:
    with pytest.raises(ValueError, match=r"unknown: head; choose from all, vision_model, adapter, language_model"):
        set_trainable_modules(model, ["adapter", "head"])
    with pytest.raises(ValueError, match="name nothing"):
        set_trainable_modules(model, [])


def test_the_model_learns_from_images() -> None:
    """Same text, two images, two answers: below ln 2 only with what the images say."""
    config = dataclasses.replace(small_config(), runtime=get_model_config("tiny").runtime)
    model = build_model(config)
    pair = [sample(20, [[1, 4, 4]], 4), sample(20, [[1, 4, 4]], 4)]
    pair[1] = dict(pair[1], images=pixels(21, [[1, 4, 4]]))
    for answer, item in enumerate(pair):
        item["labels"] = torch.full_like(item["labels"], -100)
        item["labels"][-1] = 50 + answer
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.cat(losses(model, pair)).sum() / 2
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_bf16() -> None:
    model = build_model(small_config().with_runtime(params_dtype=torch.bfloat16))
    loss = torch.cat(losses(model, SAMPLES)).sum()
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.dtype == parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())


# --- structure ---------------------------------------------------------------------------------------------------


def test_set_encoder_replaces_the_vision_forward(model: LlavaOnevision) -> None:
    model = build_model(small_config())
    expected = losses(model, SAMPLES)
    keys = set(model.state_dict())
    calls = []

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
            calls.append((tuple(pixel_values.shape), grid_thw.shape[0]))
            return model.encode_images(pixel_values, grid_thw)

    model.set_encoder(Wrapper())
    assert all(torch.equal(a, b) for a, b in zip(losses(model, SAMPLES), expected))
    model(None, None, SAMPLES[1]["tokens"][None], None, None)
    assert calls == [((36, 588), 3), ((0, 588), 0)]
    assert set(model.state_dict()) == keys, "the wrapper's parameters are the model's own"


def test_stages_hold_what_they_need() -> None:
    config = small_config()
    middle = build_model(config, pre_process=False, post_process=False)
    assert not hasattr(middle, "vision_model")
    assert not any("embedding" in name or "output_layer" in name for name, _ in middle.named_parameters())
    encoder = build_model(config, add_decoder=False)
    grids = torch.tensor([[1, 4, 4]])
    assert encoder(pixels(0, [[1, 4, 4]]), grids, None, None, None).shape == (4, config.language.hidden_size)
    text = build_model(config, add_encoder=False)
    logits = text(None, None, SAMPLES[1]["tokens"][None], None, None)
    assert logits.shape == (1, len(SAMPLES[1]["tokens"]), config.language.padded_vocab_size)


def test_checkpoints_cover_every_parameter(model: LlavaOnevision) -> None:
    saved = {tensor.data_ptr() for tensor in _leaves(model.sharded_state_dict())}
    missing = [name for name, parameter in model.named_parameters() if parameter.data_ptr() not in saved]
    assert not missing


def _leaves(sharded_state_dict: dict) -> list[Tensor]:
    return [entry.data for entry in sharded_state_dict.values() if isinstance(getattr(entry, "data", None), Tensor)]


def test_weights_depend_on_the_seed_alone(model: LlavaOnevision) -> None:
    torch.manual_seed(99)
    again, other = build_model(small_config()), build_model(small_config(seed=7))
    for (name, a), b, c in zip(model.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        is_constant = name.endswith("bias") or "norm" in name
        assert torch.equal(a, c) == is_constant, name
    layers = model.language_model.decoder.layers
    assert layers[0].mlp.linear_fc1.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert layers[0].mlp.linear_fc2.weight.std().item() == pytest.approx(0.02 / 2, rel=0.02)  # / sqrt(2 * 2 layers)
    assert not torch.equal(layers[0].mlp.linear_fc1.weight, layers[1].mlp.linear_fc1.weight)


# Billions of parameters, and the decimals published, in the model cards of Qwen2.5-3B, Qwen3-4B, Qwen3-8B, Qwen3-14B
# and Qwen3-32B: "Number of Parameters" and "Number of Parameters (Non-Embedding)".
PUBLISHED = {"3b": (3.09, 2), "4b": (4.0, 1), "8b": (8.2, 1), "14b": (14.8, 1), "32b": (32.8, 1)}
WITHOUT_EMBEDDINGS = {"3b": (2.77, 2), "4b": (3.6, 1), "8b": (6.95, 2), "14b": (13.2, 1), "32b": (31.2, 1)}


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_sizes(name: str) -> None:
    config = get_model_config(name)
    with torch.device("meta"):
        model = build_model(config)
    language = num_parameters(model.language_model)
    count, decimals = PUBLISHED[name]
    assert round(language / 1e9, decimals) == count
    copies = 1 if config.language.tie_word_embeddings else 2
    without = language - copies * config.language.vocab_size * config.language.hidden_size
    count, decimals = WITHOUT_EMBEDDINGS[name]
    assert round(without / 1e9, decimals) == count
    if name == "8b":
        assert language == 8_190_735_360
    # CLIP ViT-L/14, the same shape, has 303.97M with position embeddings (257 x 1024), pre- and post-norm and output
    # projection (1024 x 768): less those, 302.9M. RICE adds the rotary angles of the class token.
    vision = num_parameters(model.vision_model)
    assert vision == 302_309_376 + 588 * 1024 + 1024 + 32 + 2 * 1024
