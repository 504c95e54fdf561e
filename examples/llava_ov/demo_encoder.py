"""The demo's task encoder for the `aiak-ext` command, which makes it without arguments.

aiak-ext analyze runs/demo/data --task-encoder examples.llava_ov.demo_encoder:task_encoder \
    --model-config examples/llava_ov/tiny.json
"""

from __future__ import annotations

import os
from pathlib import Path

from examples.llava_ov.image_processing import ImageConfig
from examples.llava_ov.task_encoder import LlavaTaskEncoder
from examples.llava_ov.tokenizer import load_tokenizer

DATA_VARIABLE = "LLAVA_OV_DATA"
DEFAULT_DATA = "runs/demo/data"


def task_encoder() -> LlavaTaskEncoder:
    """The encoder of the data set that LLAVA_OV_DATA names; of the one that `make demo` builds without it."""
    data = Path(os.environ.get(DATA_VARIABLE, DEFAULT_DATA))
    return LlavaTaskEncoder(tokenizer=load_tokenizer(data / "tokenizer"), image_config=ImageConfig())
