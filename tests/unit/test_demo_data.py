"""The demo data builder: lengths, reproducibility, kinds of samples, and a user's own folder."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from examples.llava_ov.build_demo_data import BuildConfig, build
from examples.llava_ov.demo_lengths import (
    MIX_CV,
    MIX_FILE,
    MIX_IMAGE_SHARE,
    MIX_MEAN,
    MIX_PERCENTILES,
    LengthStats,
    mix_stats,
    target_lengths,
)
from examples.llava_ov.demo_pages import render_page
from examples.llava_ov.demo_photos import PHOTOS, SKIMAGE, crop_to
from examples.llava_ov.demo_text import collect_documents
from examples.llava_ov.image_processing import load_rgb
from examples.llava_ov.user_folder import read_folder
from tests.demo_data import SMALL, image_file, small_data_set


def read_shards(folder: Path, split: str) -> dict[str, dict[str, bytes]]:
    """{key: {part: content}} of a split."""
    samples: dict[str, dict[str, bytes]] = {}
    for shard in sorted(folder.glob(f"{split}-*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, part = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                samples.setdefault(key, {})[part] = content.read()
    return samples


def digests(folder: Path) -> dict[str, str]:
    """Checksums of shards and tokenizer."""
    files = [*sorted(folder.glob("*.tar")), *sorted((folder / "tokenizer").iterdir())]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def samples() -> dict[str, dict[str, bytes]]:
    return read_shards(small_data_set(), "train")


# Lengths


@pytest.mark.parametrize("num_samples", [160, 512, 5000])
def test_target_lengths_have_the_shape_of_the_mix(num_samples: int) -> None:
    targets = target_lengths(num_samples, 175.0, 1100, random.Random(0))
    stats = LengthStats.of(targets, [0] * num_samples)
    assert stats.num_samples == num_samples
    assert 150 < stats.mean < 200
    assert 0.9 < stats.cv < 1.1
    scale = stats.mean / MIX_MEAN
    assert stats.p50 == pytest.approx(MIX_PERCENTILES[50] * scale, rel=0.1)
    assert stats.p95 == pytest.approx(MIX_PERCENTILES[95] * scale, rel=0.1)
    assert stats.max <= 1100
    # In random order: neighbours say nothing about each other.
    assert abs(np.corrcoef(targets[:-1], targets[1:])[0, 1]) < 0.2


@pytest.mark.skipif(not MIX_FILE.is_file(), reason="the standard mix is not on this machine")
def test_constants_are_those_of_the_mix() -> None:
    stats, source = mix_stats()
    assert source == MIX_FILE.name
    assert stats.mean == pytest.approx(MIX_MEAN, abs=1)
    assert stats.cv == pytest.approx(MIX_CV, abs=0.01)
    assert stats.image_share == pytest.approx(MIX_IMAGE_SHARE, abs=0.01)
    for percent, value in ((50, stats.p50), (95, stats.p95), (100, stats.max)):
        assert MIX_PERCENTILES[percent] == pytest.approx(value, abs=1)


def test_built_samples_come_out_near_their_targets() -> None:
    lengths = json.loads((small_data_set() / "demo_data.json").read_text())["lengths"]
    assert lengths["num_samples"] == 96
    assert 150 < lengths["mean"] < 205
    assert 0.85 < lengths["cv"] < 1.15
    assert lengths["p95"] > 2.5 * lengths["mean"]
    assert lengths["max"] <= 1250
    assert 0.35 < lengths["image_share"] < 0.6


# The data set


def test_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.llava_ov.build_demo_data", "--output", str(tmp_path / "again")]
    for name in ("num_samples", "seed", "samples_per_shard"):
        command += [f"--{name.replace('_', '-')}", str(getattr(SMALL, name))]
    # Another hash seed: no order may come from sets or hashes.
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "again") == digests(small_data_set())
    assert re.search(r"this data set +96 +\d+ +\d\.\d\d", done.stdout)
    assert "standard mix, scaled" in done.stdout
    assert "train shards: 100%" in done.stderr


def test_another_seed_gives_other_samples(tmp_path: Path) -> None:
    build(tmp_path / "other", replace(SMALL, num_samples=8, seed=8))
    build(tmp_path / "same", replace(SMALL, num_samples=8, seed=7))
    assert read_shards(tmp_path / "other", "train") != read_shards(tmp_path / "same", "train")


def test_splits_are_prepared_and_disjoint(samples: dict[str, dict[str, bytes]]) -> None:
    folder = small_data_set()
    val = read_shards(folder, "val")
    assert len(val) == 6 and len(samples) == 90 and not set(val) & set(samples)
    meta = folder / ".nv-meta"
    splits = yaml.safe_load((meta / "split.yaml").read_text())["split_parts"]
    assert splits == {"train": ["train-{000000..000005}.tar"], "val": ["val-000000.tar"]}
    assert yaml.safe_load((meta / "dataset.yaml").read_text())["__class__"] == "CrudeWebdataset"


def test_every_kind_of_sample_is_there(samples: dict[str, dict[str, bytes]]) -> None:
    contents = [json.loads(parts["json"]) for parts in samples.values()]
    text_only = [content for content in contents if not content["media"]]
    pages = [content for content in contents if content["media"] == ["image0.png"]]
    photos = [content for content in contents if content["media"][:1] == ["image0.jpg"]]
    assert 0.1 < len(text_only) / len(contents) < 0.45
    assert len(pages) >= 3 and len(photos) > 0.4 * len(contents)
    assert sum(len(content["messages"]) > 2 for content in contents) > 0.1 * len(contents)
    assert any(len(content["media"]) == 2 for content in contents)
    sizes = {load_rgb(data).size for parts in samples.values() for name, data in parts.items() if name != "json"}
    assert len(sizes) > 50, "pictures have native sizes of their own"


def test_output_is_reused_for_the_same_settings_only(tmp_path: Path) -> None:
    folder = small_data_set()
    before = digests(folder)
    assert build(folder, SMALL).num_samples == 96
    assert digests(folder) == before
    with pytest.raises(ValueError, match="was built with another seed, vocab_size"):
        build(folder, replace(SMALL, seed=8, vocab_size=1000))
    with pytest.raises(ValueError, match="is not a finished demo data set"):
        build(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 1}, "num_samples=1 leaves a split empty"),
        ({"val_fraction": 0.0}, "val_fraction=0.0 leaves a split empty"),
        ({"mean_length": 2000.0}, "fit no length distribution"),
    ],
)
def test_impossible_settings_are_errors(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuildConfig(**settings)


# Its parts


def test_all_bundled_photos_are_there() -> None:
    assert sum(photo.source == SKIMAGE for photo in PHOTOS) == 16 and len(PHOTOS) == 18
    for photo in PHOTOS:
        data = crop_to(photo, 20_000, random.Random(1))
        width, height = load_rgb(data).size
        assert width * height == pytest.approx(20_000, rel=0.05)
        assert len(photo.questions) >= 3
    with pytest.raises(FileNotFoundError, match="not part of this skimage release"):
        replace(PHOTOS[0], file="none.png").image  # noqa: B018


def test_page_shows_exactly_its_transcript() -> None:
    words = " ".join(f"word{index}" for index in range(400))
    page, transcript = render_page(words, 60_000, random.Random(0))
    image = load_rgb(page)
    assert image.width * image.height == pytest.approx(60_000, rel=0.02)
    drawn = transcript.split()
    assert 20 < len(drawn) < 400, "what does not fit is on neither"
    assert drawn == words.split()[: len(drawn)]
    # One band of ink per line, none at the rim.
    ink = np.asarray(image.convert("L")) < 128
    bands = np.flatnonzero(np.diff(ink.any(axis=1).astype(int)) == 1)
    assert len(bands) == len(transcript.splitlines())
    assert not ink[:, -3:].any() and not ink[-3:].any()


def test_page_breaks_a_word_that_is_too_wide() -> None:
    _, transcript = render_page("a" * 200, 10_000, random.Random(0))
    assert len(transcript.splitlines()) > 1
    assert set(transcript.replace("\n", "")) == {"a"}


def test_documents_are_real_and_distinct() -> None:
    documents = collect_documents()
    assert len({document.lines for document in documents}) == len(documents) > 300
    titles = [document.title for document in documents]
    assert "`textwrap.dedent`" in titles and "the licence of click" in titles
    assert all(line.isascii() and line.strip() for document in documents for line in document.lines)


# A folder of the user's own


def write_folder(folder: Path) -> None:
    picture = image_file(Image.effect_noise((90, 60), 50).convert("RGB"), "JPEG")
    for name in ("a.b", "captioned", "talk", "gpt"):
        (folder / f"{name}.jpg").write_bytes(picture)
    (folder / "a.b.txt").write_text("A grey noise.\n")
    (folder / "captioned.json").write_text(json.dumps({"captions": ["Noise.", "More noise."]}))
    talk = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Noise."}]
    (folder / "talk.json").write_text(json.dumps({"messages": talk}))
    said = [{"from": "human", "value": "Look: <image>"}, {"from": "gpt", "value": "I see."}]
    (folder / "gpt.json").write_text(json.dumps({"conversations": said}))
    (folder / "words.json").write_text(json.dumps({"messages": talk}))
    (folder / "notes.md").write_text("not a sample")


def test_own_folder_becomes_a_data_set(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    write_folder(mine)
    stats = build(tmp_path / "data", BuildConfig(images=str(mine), vocab_size=300))
    assert stats.num_samples == 5
    built = {**read_shards(tmp_path / "data", "train"), **read_shards(tmp_path / "data", "val")}
    questions = {key: json.loads(parts["json"])["messages"][0]["content"] for key, parts in built.items()}
    assert questions == {
        "a_b": "<image>\nDescribe the picture.",
        "captioned": "<image>\nDescribe the picture.",
        "talk": "<image>\nWhat?",
        "gpt": "Look: <image>",
        "words": "What?",
    }
    assert built["gpt"]["image0.jpg"] == (mine / "gpt.jpg").read_bytes()
    assert json.loads(built["captioned"]["json"])["messages"][1]["content"] == "Noise."

    (mine / "talk.jpg").write_bytes((mine / "talk.jpg").read_bytes()[:-100])
    with pytest.raises(ValueError, match="sample talk: image file"):
        build(tmp_path / "broken", BuildConfig(images=str(mine), vocab_size=300))
    assert not (tmp_path / "broken").exists()
    with pytest.raises(ValueError, match="holds 5 samples, 9 are wanted"):
        build(tmp_path / "more", BuildConfig(images=str(mine), num_samples=9))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.md": ""}, "holds no sample"),
        ({"a.jpg": ""}, "no .json or .txt beside a.jpg"),
        ({"a.txt": "Nice."}, "a.txt describes a picture that is not there"),
        ({"a.jpg": "", "a.json": "{"}, "a.json cannot be read"),
        ({"a.jpg": "", "a.json": "[1]"}, "a.json cannot be read"),
        ({"a.jpg": "", "a.json": '{"captions": []}'}, "a.json cannot be read"),
        ({"a.json": '{"conversations": [{"from": "cat", "value": "Miaow"}]}'}, "a.json cannot be read"),
        ({"a.json": '{"messages": []}'}, "a.json holds no question"),
        ({"a.jpg": "", "a.png": "", "a.txt": "Nice."}, "a.jpg and a.png have one name"),
    ],
)
def test_odd_folders_are_errors(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_folder(tmp_path)


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        read_folder(tmp_path / "none")
