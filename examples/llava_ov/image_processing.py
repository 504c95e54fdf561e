"""Pictures to patches at native resolution: decode, resize to the patch grid, normalise, cut.

Follows the Qwen2-VL preprocessing that LLaVA-OneVision-1.5 uses, without the temporal patch (1 frame).
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps

#: What Pillow's decoders raise on damaged files. SyntaxError is its verdict on a broken PNG; left alone it
#: would count as a fault of the program and end the run, instead of going to Energon's error handler.
DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)

#: Channel statistics of the CLIP training set, in RGB order; values in [0, 1].
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


#: Change of aspect ratio that rounding may cause. Sides of at least one token stay below it.
MAX_STRETCH = 2.0


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Geometry of the vision tower and the bounds of a picture's size."""

    #: Side of a patch in pixels.
    patch_size: int = 14
    #: Patches per side that the adapter merges into one visual token.
    merge_size: int = 2
    #: Pictures with fewer pixels are enlarged (default: 4 visual tokens).
    min_pixels: int = 4 * 28 * 28
    #: Pictures with more pixels are reduced (default: the 1344 x 1344 of LLaVA-OneVision-1.5).
    max_pixels: int = 1344 * 1344
    #: Longest side over shortest side that is still accepted.
    max_aspect_ratio: float = 200.0

    def __post_init__(self) -> None:
        """Raises ValueError when no picture size can satisfy the bounds."""
        if self.min_pixels < self.factor**2 or self.max_pixels < self.min_pixels:
            raise ValueError(
                f"min_pixels={self.min_pixels} and max_pixels={self.max_pixels} leave no picture size: "
                f"{self.factor}**2 <= min_pixels <= max_pixels is needed"
            )

    @property
    def factor(self) -> int:
        """Pixels per side of one visual token; picture sides are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Values per patch, 3 * patch_size**2."""
        return 3 * self.patch_size**2


def smart_resize(height: int, width: int, config: ImageConfig) -> tuple[int, int]:
    """Size nearest to the native one, with sides that are multiples of `config.factor` and an area in bounds.

    Args:
        height: Native height in pixels.
        width: Native width in pixels.
        config: Factor and bounds.

    Returns:
        (height, width) in pixels. A very flat picture can exceed `max_pixels`, since no side is
        shorter than the factor.

    Raises:
        ValueError: An empty picture, one longer than `max_aspect_ratio` times its width, or a thin one that
            the grid would stretch to more than twice its width.
    """
    if height < 1 or width < 1:
        raise ValueError(f"the picture is {width} x {height} pixels; there is nothing to see in it")
    aspect_ratio = max(height, width) / min(height, width)
    if aspect_ratio > config.max_aspect_ratio:
        raise ValueError(
            f"the picture is {width} x {height} pixels, an aspect ratio of {aspect_ratio:.0f}, and hardly "
            f"readable at any size; crop it to {config.max_aspect_ratio:.0f} or less"
        )
    factor = config.factor
    new_height = max(factor, round(height / factor) * factor)
    new_width = max(factor, round(width / factor) * factor)
    if new_height * new_width > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < config.min_pixels:
        enlarge = math.sqrt(config.min_pixels / (height * width))
        new_height = math.ceil(height * enlarge / factor) * factor
        new_width = math.ceil(width * enlarge / factor) * factor
    stretch = (new_height / new_width) / (height / width)
    if not 1 / MAX_STRETCH <= stretch <= MAX_STRETCH:
        raise ValueError(
            f"the picture is {width} x {height} pixels and would be shown to the model as {new_width} x "
            f"{new_height}, out of shape by {max(stretch, 1 / stretch):.1f}; enlarge it so that its shorter side "
            f"has {factor} pixels or more"
        )
    return new_height, new_width


def num_visual_tokens(height: int, width: int, config: ImageConfig) -> int:
    """Tokens that a picture of this native size takes in the language model."""
    new_height, new_width = smart_resize(height, width, config)
    return (new_height // config.factor) * (new_width // config.factor)


def load_rgb(data: bytes) -> Image.Image:
    """Decodes an image file to RGB as a viewer would show it.

    EXIF rotation is applied, transparency is laid on white, 16-bit grey is scaled to 8 bits.

    Raises:
        ValueError: The file cannot be decoded completely, or cannot be shown as one RGB picture.
    """
    try:
        file = Image.open(io.BytesIO(data))
        num_frames = getattr(file, "n_frames", 1)
        image = ImageOps.exif_transpose(file)
        image.load()
    except DECODE_ERRORS as error:
        raise ValueError(f"image file of {len(data)} bytes cannot be decoded: {error}") from error
    # A phone's MPO file is a JPEG with previews behind it; any other file of several frames is a video.
    if num_frames > 1 and file.format != "MPO":
        raise ValueError(f"{file.format} file has {num_frames} frames; pass a video as a list of frames")
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range; store the picture with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        canvas = Image.new("RGBA", image.size, "white")
        canvas.alpha_composite(image)
        image = canvas
    return image.convert("RGB")


def process_frames(frames: list[bytes], config: ImageConfig) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Turns a picture (one frame) or a video (several of equal size) into patches.

    Args:
        frames: Encoded image files.
        config: Patch geometry and size bounds, per frame.

    Returns:
        float32 [t * h * w, patch_dim] and the grid (t, h, w) in patches. Patches come frame by frame, and
        within a frame so that the merge_size**2 patches of one visual token follow each other, which is
        the order of the vision tower's 2D rotary positions.

    Raises:
        ValueError: No frame, a frame that cannot be used, or frames of different sizes.
    """
    if not frames:
        raise ValueError("a video without frames; give at least one")
    images = [load_rgb(data) for data in frames]
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        raise ValueError(f"frames of one video have different sizes, {sorted(sizes)}; resize them to one")
    height, width = smart_resize(images[0].height, images[0].width, config)
    patches = [_patchify(_normalise(image, height, width), config) for image in images]
    grid = (len(images), height // config.patch_size, width // config.patch_size)
    return torch.from_numpy(np.concatenate(patches)), grid


def _normalise(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Float32 [3, height, width] with CLIP's channel statistics."""
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, dtype=np.float32) / 255.0
    pixels = (pixels - np.asarray(CLIP_MEAN, np.float32)) / np.asarray(CLIP_STD, np.float32)
    return pixels.transpose(2, 0, 1)


def _patchify(pixels: np.ndarray, config: ImageConfig) -> np.ndarray:
    """Cuts [3, height, width] into [num_patches, patch_dim], the patches of one visual token in a row."""
    channels, height, width = pixels.shape
    patch, merge, factor = config.patch_size, config.merge_size, config.factor
    blocks = pixels.reshape(channels, height // factor, merge, patch, width // factor, merge, patch)
    # -> token row, token column, row in token, column in token, channel, pixel row, pixel column
    blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)
    return np.ascontiguousarray(blocks).reshape(-1, channels * patch * patch)
