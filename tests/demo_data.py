"""Demo data and image files for tests, built once per test run."""

from __future__ import annotations

import functools
import io
import tempfile
from pathlib import Path

from PIL import Image

from examples.llava_ov.build_demo_data import BuildConfig, build

SMALL = BuildConfig(num_samples=96, seed=7, samples_per_shard=16)

#: Real files with faults, beside the project on some machines only.
EDGE_FILES = Path(__file__).resolve().parents[2] / "shared" / "data" / "edge"


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="aiak-ext-demo-data-")


@functools.cache
def small_data_set() -> Path:
    """Folder of a finished data set of 96 samples; removed when the interpreter ends. Not to be changed."""
    output = Path(_scratch().name) / "small"
    build(output, SMALL)
    return output


def image_file(image: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    """The picture as a file of the given format."""
    out = io.BytesIO()
    image.save(out, format=file_format, **options)
    return out.getvalue()
