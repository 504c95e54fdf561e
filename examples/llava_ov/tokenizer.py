"""The text tokenizer: any Hugging Face directory, or a small byte-level BPE trained on the demo's own text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# The names that Qwen2-VL and its successors use, so that their tokenizers fit as they are.
PAD_TOKEN = "<|endoftext|>"
TURN_START_TOKEN = "<|im_start|>"
TURN_END_TOKEN = "<|im_end|>"
VISION_START_TOKEN = "<|vision_start|>"
VISION_END_TOKEN = "<|vision_end|>"
IMAGE_TOKEN = "<|image_pad|>"
SPECIAL_TOKENS = (
    PAD_TOKEN,
    TURN_START_TOKEN,
    TURN_END_TOKEN,
    VISION_START_TOKEN,
    VISION_END_TOKEN,
    IMAGE_TOKEN,
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE; the same texts in the same order give the same tokenizer.

    Args:
        texts: Training text.
        vocab_size: Upper bound of the vocabulary, special tokens included.

    Raises:
        ValueError: `vocab_size` has no room for the 256 bytes and the special tokens.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} cannot hold all bytes and special tokens; use {smallest} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD_TOKEN, eos_token=TURN_END_TOKEN)


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Loads a Hugging Face tokenizer directory and adds the special tokens that it lacks.

    `len(tokenizer)` is the vocabulary size the model needs.

    Raises:
        ValueError: There is no such directory; names are never looked up on the network.
    """
    if not Path(directory).is_dir():
        raise ValueError(
            f"{directory} is not a tokenizer directory; build one with `python -m "
            "examples.llava_ov.build_demo_data` or pass a downloaded Hugging Face tokenizer"
        )
    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    known = tokenizer.get_vocab()
    missing = [token for token in SPECIAL_TOKENS if token not in known]
    if missing:
        tokenizer.add_special_tokens({"additional_special_tokens": missing})
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = PAD_TOKEN
    return tokenizer


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Id of a special token, for example `IMAGE_TOKEN`."""
    index = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(index, int) and index >= 0, f"{token} is not in the vocabulary"
    return index


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of plain text: what looks like a special token in it stays text.

    Otherwise a document that mentions `<|image_pad|>` would ask for a picture that is not there.
    """
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
