"""Builds the example's training data: WebDataset shards, tokenizer, and what `energon prepare` adds.

python -m examples.llava_ov.build_demo_data --output runs/data
python -m examples.llava_ov.build_demo_data --output runs/mine --images my_folder
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import webdataset
from megatron.energon.tools.prepare import command as energon_prepare
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from examples.llava_ov.demo_lengths import LengthStats, format_report, target_lengths
from examples.llava_ov.demo_photos import PHOTOS
from examples.llava_ov.demo_samples import RawSample, SampleWriter
from examples.llava_ov.demo_text import collect_documents
from examples.llava_ov.image_processing import ImageConfig
from examples.llava_ov.samples import ChatSample, Conversation
from examples.llava_ov.task_encoder import LlavaTaskEncoder
from examples.llava_ov.tokenizer import load_tokenizer, train_tokenizer
from examples.llava_ov.user_folder import read_folder

#: Sub-folder of a data set that holds its tokenizer.
TOKENIZER_FOLDER = "tokenizer"
#: Settings and statistics of a finished data set.
INFO_FILE = "demo_data.json"


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """What determines a data set."""

    #: Samples, train and validation together; None: 576, or all of `images`.
    num_samples: int | None = None
    seed: int = 42
    #: Folder of the user's own pictures and texts; None: the bundled photos and texts.
    images: str | None = None
    #: Hugging Face tokenizer directory to use; None: train a small one.
    tokenizer: str | None = None
    vocab_size: int = 2048
    #: Of the generated samples: mean and largest number of tokens.
    mean_length: float = 175.0
    max_length: int = 1100
    #: Largest picture size that the lengths are measured with.
    max_pixels: int = ImageConfig.max_pixels
    val_fraction: float = 1 / 16
    samples_per_shard: int = 64

    def __post_init__(self) -> None:
        """Raises ValueError for settings that give no data set."""
        if self.num_samples is not None and self.num_samples < 2:
            raise ValueError(f"num_samples={self.num_samples} leaves a split empty; use 2 or more")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction} leaves a split empty; use a value between 0 and 1")
        if not 0 < self.mean_length <= self.max_length:
            raise ValueError(
                f"mean_length={self.mean_length} and max_length={self.max_length} fit no length distribution; "
                "0 < mean_length <= max_length is needed"
            )


def build(output: Path, config: BuildConfig) -> LengthStats:
    """Writes a data set, or returns the statistics of the one that is there with the same settings.

    The same settings on the same installation give the same shards, byte for byte. The folder appears
    only when it is complete.

    Args:
        output: Folder to create; holds the shards, `tokenizer/` and Energon's `.nv-meta/`.
        config: What to build.

    Raises:
        ValueError: The folder holds something else, or the user's own samples cannot be used.
    """
    settings = asdict(config)
    if output.exists():
        return _reuse(output, settings)
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    samples, tokenizer = _compose(config)
    tokenizer.save_pretrained(partial / TOKENIZER_FOLDER)
    stats = _measure(samples, tokenizer, config)
    num_val = min(max(1, round(len(samples) * config.val_fraction)), len(samples) - 1)
    names = list(samples)
    _write_shards(partial, "val", {name: samples[name] for name in names[:num_val]}, config)
    _write_shards(partial, "train", {name: samples[name] for name in names[num_val:]}, config)
    prepare(partial)
    info = {"settings": settings, "lengths": asdict(stats)}
    (partial / INFO_FILE).write_text(json.dumps(info, indent=2) + "\n")
    partial.rename(output)
    return stats


def _reuse(output: Path, settings: dict[str, object]) -> LengthStats:
    """Statistics of the finished data set in `output`, if it was built with the same settings."""
    info_file = output / INFO_FILE
    if not info_file.is_file():
        raise ValueError(f"{output} exists and is not a finished demo data set; choose another folder or remove it")
    info = json.loads(info_file.read_text())
    if info["settings"] != settings:
        differing = sorted(key for key in settings if settings[key] != info["settings"].get(key))
        raise ValueError(f"{output} was built with another {', '.join(differing)}; choose another folder or remove it")
    click.echo(f"{output} was built with these settings before and is used again; remove it to build anew")
    return LengthStats(**info["lengths"])


def _compose(config: BuildConfig) -> tuple[dict[str, RawSample], PreTrainedTokenizerBase]:
    """All samples by name, in their final order, and the tokenizer."""
    rng = random.Random(config.seed)
    if config.images is not None:
        found = read_folder(Path(config.images))
        num_samples = len(found) if config.num_samples is None else config.num_samples
        if not 2 <= num_samples <= len(found):
            raise ValueError(f"{config.images} holds {len(found)} samples, {max(2, num_samples)} are wanted; add some")
        names = rng.sample(sorted(found), num_samples)
        texts = [text for name in sorted(found) for text in found[name].texts()]
        return {name: found[name] for name in names}, _make_tokenizer(config, texts)
    documents = collect_documents()
    texts = ["\n".join(document.lines) for document in documents]
    for photo in PHOTOS:
        texts += [photo.caption, photo.details, *(text for pair in photo.questions for text in pair)]
    tokenizer = _make_tokenizer(config, texts)
    writer = SampleWriter(tokenizer, documents, config.mean_length)
    targets = target_lengths(config.num_samples or 576, config.mean_length, config.max_length, rng)
    samples = {}
    for index, num_tokens in enumerate(tqdm(targets, desc="samples", unit=" samples")):
        samples[f"demo{index:06d}"] = writer.write(num_tokens, rng)
    return samples, tokenizer


def _make_tokenizer(config: BuildConfig, texts: list[str]) -> PreTrainedTokenizerBase:
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    return train_tokenizer(texts, config.vocab_size)


def _media_names(sample: RawSample) -> list[str]:
    return [f"image{index}.{suffix}" for index, (suffix, _) in enumerate(sample.images)]


def _measure(samples: dict[str, RawSample], tokenizer: PreTrainedTokenizerBase, config: BuildConfig) -> LengthStats:
    """Encodes every sample as training will, so that one that cannot be used is found here."""
    encoder = LlavaTaskEncoder(tokenizer=tokenizer, image_config=ImageConfig(max_pixels=config.max_pixels))
    total, visual = [], []
    for name, sample in tqdm(samples.items(), desc="lengths", unit=" samples"):
        chat = Conversation(messages=sample.messages, media=[content for _, content in sample.images])
        encoded = encoder.encode_sample(ChatSample(__key__=name, __restore_key__=(), conversations=[chat]))
        total.append(encoded.total_len)
        visual.append(len(encoded.pixel_values) // encoder.image_config.merge_size**2)
    return LengthStats.of(total, visual)


def _write_shards(folder: Path, split: str, samples: dict[str, RawSample], config: BuildConfig) -> None:
    pattern = str(folder / f"{split}-%06d.tar")
    # A fixed time stamp makes the shards reproducible; encoder=False: the parts are bytes already.
    options = {"maxcount": config.samples_per_shard, "mtime": 0, "encoder": False, "verbose": 0}
    with webdataset.ShardWriter(pattern, **options) as shards:
        for name, sample in tqdm(samples.items(), desc=f"{split} shards", unit=" samples"):
            names = _media_names(sample)
            content = {"messages": sample.messages, "media": names}
            parts = dict(zip(names, (data for _, data in sample.images)))
            shards.write({"__key__": name, "json": json.dumps(content).encode(), **parts})


def prepare(folder: Path) -> None:
    """Runs `energon prepare` without questions: indexes the shards, names the splits and the sample type."""
    arguments = [str(folder), "--non-interactive", "--no-progress", "--num-workers", "1"]
    arguments += ["--split-parts", r"train:train-.*\.tar", "--split-parts", r"val:val-.*\.tar"]
    arguments += ["--sample-type", "CrudeWebdataset"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        energon_prepare.main(args=arguments, standalone_mode=False)
    if not (folder / ".nv-meta" / "dataset.yaml").is_file():
        raise RuntimeError(f"energon prepare did not finish:\n{printed.getvalue()}")


@click.command(context_settings={"show_default": True})
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to create.")
@click.option("--num-samples", type=int, help="Train and validation together.  [default: 576, or all of --images]")
@click.option("--seed", type=int, default=BuildConfig.seed)
@click.option("--images", help="Folder of your own: NAME.jpg with NAME.json or NAME.txt.")
@click.option("--tokenizer", help="Hugging Face tokenizer directory, instead of training a small one.")
@click.option("--vocab-size", type=int, default=BuildConfig.vocab_size, help="Of the tokenizer to train.")
@click.option("--mean-length", type=float, default=BuildConfig.mean_length, help="Mean tokens of generated samples.")
@click.option("--max-length", type=int, default=BuildConfig.max_length, help="Most tokens of generated samples.")
@click.option("--max-pixels", type=int, default=BuildConfig.max_pixels, help="Picture size to measure lengths with.")
@click.option("--val-fraction", type=float, default=BuildConfig.val_fraction)
@click.option("--samples-per-shard", type=int, default=BuildConfig.samples_per_shard)
def main(output: Path, **settings: object) -> None:
    """Builds a data set for the example and prints its length distribution beside the standard mix's."""
    try:
        stats = build(output, BuildConfig(**settings))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    click.echo(format_report(stats))
    click.echo(f"data set: {output}, tokenizer: {output / TOKENIZER_FOLDER}")


if __name__ == "__main__":
    main()
