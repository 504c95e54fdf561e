"""Samples from a folder of the user's own: NAME.jpg beside NAME.json or NAME.txt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.llava_ov.demo_samples import RawSample

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
TEXT_SUFFIXES = (".json", ".txt")
CAPTION_PROMPT = "Describe the picture."
#: Speaker names of ShareGPT files.
SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


def read_folder(folder: Path) -> dict[str, RawSample]:
    """All samples of a folder by name, in the order of their names.

    `NAME.txt` is the description of the picture `NAME.jpg` (or another image format). `NAME.json` holds
    `messages` (`role`, `content`) or `conversations` (`from`, `value`), else `caption` or `captions`, of
    which the first is used. A conversation without picture is a text-only sample. Where no question has an
    `<image>` placeholder, the picture goes before the first one. Image files are taken as they are.

    Raises:
        ValueError: No sample in the folder, a picture without text, a text without picture or question, or
            two pictures or texts of one name; the message names the file.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one with NAME.jpg and NAME.json or NAME.txt pairs")
    images: dict[str, Path] = {}
    texts: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        suffix = path.suffix.lower()
        if suffix not in (*IMAGE_SUFFIXES, *TEXT_SUFFIXES):
            continue
        found = images if suffix in IMAGE_SUFFIXES else texts
        # WebDataset reads a dot in a key as the start of the part's name.
        name = path.stem.replace(".", "_")
        if name in found:
            raise ValueError(f"{found[name].name} and {path.name} have one name; rename or remove one of them")
        found[name] = path
    without_text = [path.name for name, path in images.items() if name not in texts]
    if without_text:
        raise ValueError(f"no .json or .txt beside {', '.join(without_text[:5])}; write one or remove the picture")
    if not texts:
        raise ValueError(f"{folder} holds no sample; give NAME.jpg and NAME.json or NAME.txt pairs")
    return {name: _read_sample(path, images.get(name)) for name, path in texts.items()}


def _read_sample(path: Path, image: Path | None) -> RawSample:
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text) if path.suffix.lower() == ".json" else {"caption": text.strip()}
        messages = _to_messages(content)
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}); it must hold messages, conversations, "
            "caption or captions"
        ) from error
    questions = [message for message in messages if message["role"] == "user"]
    if not questions:
        raise ValueError(f"{path} holds no question; a conversation needs a turn of the user")
    if image is None:
        if "messages" not in content and "conversations" not in content:
            raise ValueError(f"{path} describes a picture that is not there; add {path.stem}.jpg")
        return RawSample(messages=messages)
    if not any("<image>" in question["content"] for question in questions):
        questions[0]["content"] = "<image>\n" + questions[0]["content"]
    return RawSample(messages=messages, images=[(image.suffix[1:].lower(), image.read_bytes())])


def _to_messages(content: dict[str, Any]) -> list[dict[str, str]]:
    if "messages" in content:
        return [{"role": turn["role"], "content": turn["content"]} for turn in content["messages"]]
    if "conversations" in content:
        return [{"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]} for turn in content["conversations"]]
    caption = content["caption"] if "caption" in content else content["captions"][0]
    return [{"role": "user", "content": CAPTION_PROMPT}, {"role": "assistant", "content": caption}]
