"""Native-resolution preprocessing: sizes, patch order, and files that are not plain RGB."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from examples.llava_ov.image_processing import (
    CLIP_MEAN,
    CLIP_STD,
    MAX_STRETCH,
    ImageConfig,
    load_rgb,
    num_visual_tokens,
    process_frames,
    smart_resize,
)
from tests.demo_data import EDGE_FILES, image_file

CONFIG = ImageConfig()


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(), mode="CMYK" if mode == "CMYK" else None)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (28, 28, (56, 56)),  # below four tokens: enlarged
        (56, 56, (56, 56)),
        (427, 640, (420, 644)),  # each side to the nearest multiple of 28
        (422, 640, (420, 644)),
        (3000, 4000, (1148, 1540)),  # above 1344 x 1344 pixels: reduced, rounded down
        (1, 1, (56, 56)),
        (28, 5600, (28, 5600)),  # exactly the largest aspect ratio
    ],
)
def test_smart_resize_examples(height: int, width: int, expected: tuple[int, int]) -> None:
    assert smart_resize(height, width, CONFIG) == expected


@given(st.integers(28, 5000), st.integers(28, 5000))
def test_smart_resize_keeps_bounds_and_shape(height: int, width: int) -> None:
    new_height, new_width = smart_resize(height, width, CONFIG)
    assert new_height % 28 == 0 and new_width % 28 == 0
    assert CONFIG.min_pixels <= new_height * new_width <= CONFIG.max_pixels
    assert 1 / MAX_STRETCH <= (new_height / new_width) / (height / width) <= MAX_STRETCH
    assert num_visual_tokens(height, width, CONFIG) == new_height * new_width // 28**2


@pytest.mark.parametrize(
    ("height", "width", "message"),
    [
        (0, 100, "nothing to see"),
        (100, 0, "nothing to see"),
        (5, 1001, "aspect ratio of 200"),
        (10, 1000, "out of shape by 2.8"),
        (1000, 10, "out of shape by 2.8"),
    ],
)
def test_smart_resize_refuses_what_it_would_distort(height: int, width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        smart_resize(height, width, CONFIG)


def test_config_refuses_impossible_bounds() -> None:
    with pytest.raises(ValueError, match="leave no picture size"):
        ImageConfig(min_pixels=5000, max_pixels=4000)


@pytest.mark.parametrize("size", [(200, 75), (75, 200), (640, 427), (30, 31), (2000, 1500)])
def test_patches_equal_those_of_the_qwen_processor(size: tuple[int, int]) -> None:
    module = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
        reason="this transformers has no Qwen2-VL image processor without torchvision",
    )
    reference = module.Qwen2VLImageProcessorPil(
        temporal_patch_size=1, size={"shortest_edge": CONFIG.min_pixels, "longest_edge": CONFIG.max_pixels}
    )
    image = noise(*size)
    expected = reference(images=[image], return_tensors="pt")
    patches, grid = process_frames([image_file(image)], CONFIG)
    assert [list(grid)] == expected["image_grid_thw"].tolist()
    torch.testing.assert_close(patches, expected["pixel_values"], rtol=0, atol=1e-6)


def test_four_patches_in_a_row_make_one_token() -> None:
    # Every 28 x 28 block of the picture has one grey value of its own.
    blocks = np.arange(2 * 3, dtype=np.uint8).reshape(2, 3) * 10
    image = Image.fromarray(np.kron(blocks, np.ones((28, 28), dtype=np.uint8)))
    patches, grid = process_frames([image_file(image)], CONFIG)
    assert grid == (1, 4, 6) and patches.shape == (24, 588) and patches.dtype == torch.float32
    red = patches[:, :196] * CLIP_STD[0] + CLIP_MEAN[0]
    per_token = (red * 255).round().reshape(6, 4 * 196)
    assert per_token.min(dim=1).values.tolist() == per_token.max(dim=1).values.tolist() == [0, 10, 20, 30, 40, 50]


def test_patch_order_follows_the_rotary_positions() -> None:
    """Patch k holds the pixels at the (row, column) that the guide's position formula gives to k."""
    image = noise(84, 56)
    patches, (_, height, width) = process_frames([image_file(image)], CONFIG)
    rows = torch.arange(height).unsqueeze(1).expand(-1, width)
    columns = torch.arange(width).unsqueeze(0).expand(height, -1)
    order = [
        ids.reshape(height // 2, 2, width // 2, 2).permute(0, 2, 1, 3).flatten().tolist() for ids in (rows, columns)
    ]
    pixels = np.asarray(image, dtype=np.float32) / 255
    pixels = (pixels - np.array(CLIP_MEAN, np.float32)) / np.array(CLIP_STD, np.float32)
    for index, (row, column) in enumerate(zip(*order)):
        block = pixels[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14].transpose(2, 0, 1)
        np.testing.assert_allclose(patches[index].numpy(), block.ravel(), atol=1e-5)


def test_video_frames_follow_each_other() -> None:
    frames = [image_file(noise(60, 60)), image_file(Image.new("RGB", (60, 60)))]
    video, grid = process_frames(frames, CONFIG)
    assert grid == (2, 4, 4)
    assert torch.equal(video, torch.cat([process_frames([frame], CONFIG)[0] for frame in frames]))
    with pytest.raises(ValueError, match="different sizes"):
        process_frames([frames[0], image_file(noise(60, 61))], CONFIG)
    with pytest.raises(ValueError, match="without frames"):
        process_frames([], CONFIG)


def test_exif_rotation_is_applied() -> None:
    image = noise(80, 60)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it a quarter turn clockwise
    shown = load_rgb(image_file(image, exif=exif))
    assert shown.size == (60, 80)
    np.testing.assert_array_equal(np.asarray(shown), np.rot90(np.asarray(image), k=-1))


def test_other_modes_become_what_a_viewer_shows() -> None:
    grey = noise(40, 30, "L")
    np.testing.assert_array_equal(np.asarray(load_rgb(image_file(grey))), np.stack([np.asarray(grey)] * 3, axis=-1))
    palette = noise(40, 30).quantize(16)
    np.testing.assert_array_equal(np.asarray(load_rgb(image_file(palette))), np.asarray(palette.convert("RGB")))
    cmyk = load_rgb(image_file(Image.new("CMYK", (40, 30), (0, 255, 255, 0)), "TIFF"))
    assert cmyk.mode == "RGB" and cmyk.getpixel((5, 5)) == (255, 0, 0)
    deep = Image.fromarray(np.full((30, 40), 0x8000, dtype=np.uint16))
    assert load_rgb(image_file(deep)).getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_are_white(mode: str) -> None:
    # Black under the transparency: dropping the alpha channel would show it.
    transparent = Image.new(mode, (40, 30), (0,) * len(Image.new(mode, (1, 1)).getbands()))
    assert load_rgb(image_file(transparent)).getpixel((3, 3)) == (255, 255, 255)


def damaged_png() -> bytes:
    """A PNG whose second chunk is broken, which Pillow reports as a SyntaxError."""
    data = bytearray(image_file(noise(64, 64)))
    position = data.index(b"IDAT")
    data[position : position + 4] = b"\x00\x00\x00\x00"
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"this is no picture",
        image_file(noise(200, 200), "JPEG")[:-3000],
        image_file(noise(200, 200))[:-3000],
        damaged_png(),
    ],
    ids=["empty", "text", "truncated JPEG", "truncated PNG", "damaged PNG"],
)
def test_damaged_files_are_errors(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"image file of {len(data)} bytes cannot be decoded"):
        process_frames([data], CONFIG)


def test_files_without_one_clear_picture_are_errors() -> None:
    animation = image_file(noise(40, 30), "GIF", save_all=True, append_images=[Image.new("RGB", (40, 30))])
    with pytest.raises(ValueError, match="2 frames"):
        load_rgb(animation)
    with pytest.raises(ValueError, match="no known range"):
        load_rgb(image_file(Image.new("F", (40, 30)), "TIFF"))


@pytest.mark.skipif(not EDGE_FILES.is_dir(), reason="the real files with faults are not on this machine")
def test_real_files_with_faults() -> None:
    def read(name: str) -> bytes:
        return (EDGE_FILES / f"african_elephants_{name}.jpg").read_bytes()

    with pytest.raises(ValueError, match="truncated"):
        load_rgb(read("truncated_file"))
    rotated = read("with_exif_orientation")
    with Image.open(io.BytesIO(rotated)) as stored:
        assert load_rgb(rotated).size == (stored.height, stored.width)
    # The same photograph in all files: brightness agrees, so CMYK is neither inverted nor black.
    thumbnails = {
        name: np.asarray(load_rgb(read(name)).resize((32, 24)).convert("L"), dtype=np.float64)
        for name in ("bw", "cmyk", "with_exif_orientation")
    }
    for name in ("cmyk", "with_exif_orientation"):
        assert np.corrcoef(thumbnails["bw"].ravel(), thumbnails[name].ravel())[0, 1] > 0.95, name
        assert abs(thumbnails["bw"].mean() - thumbnails[name].mean()) < 16, name
