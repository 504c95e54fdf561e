"""Writes the demo's conversations: captions, chats about photos, page transcripts, text; each to a length."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from examples.llava_ov.chat_template import render_chat
from examples.llava_ov.demo_pages import render_page
from examples.llava_ov.demo_photos import PHOTOS, Photo, crop_to
from examples.llava_ov.demo_text import Document
from examples.llava_ov.tokenizer import encode_text

#: Pixels behind one visual token (2x2 patches of 14 x 14).
PIXELS_PER_TOKEN = 28 * 28
#: Fewest visual tokens of a picture (`ImageConfig.min_pixels`).
MIN_VISUAL_TOKENS = 4

#: Shares of captions, chats, pages and texts among samples of up to so many times the mean length. As in the
#: standard mix short samples are mostly captions, the longest ones pages and text, a quarter is without image,
#: and nearly half of all tokens are visual.
KIND_WEIGHTS = (
    (0.35, (0.50, 0.10, 0.00, 0.40)),
    (1.00, (0.60, 0.25, 0.00, 0.15)),
    (2.00, (0.10, 0.50, 0.15, 0.25)),
    (float("inf"), (0.00, 0.30, 0.45, 0.25)),
)
#: Share of text in chats about photos (at most) and in pages.
CHAT_TEXT_SHARE = 0.35
PAGE_TEXT_SHARE = 0.3

#: What a request to quote takes, with the marks of both turns.
QUESTION_TOKENS = 22
#: Passages to choose from; more come nearer to the wanted length.
NUM_DRAWS = 12

CAPTION_PROMPTS = ("Describe the picture.", "What is this?", "Give a caption.")
DETAIL_PROMPTS = ("Describe the picture in detail.", "What can you see here?")
PAGE_PROMPTS = ("Read the page.", "What does the page say?", "Write down the text of this page.")


@dataclass
class RawSample:
    """A sample as it goes into a shard: messages, and image files as (extension, content)."""

    messages: list[dict[str, str]] = field(default_factory=list)
    images: list[tuple[str, bytes]] = field(default_factory=list)

    def add_turn(self, question: str, answer: str) -> None:
        """Appends a question and its answer."""
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer})

    def texts(self) -> list[str]:
        """The contents of all messages."""
        return [message["content"] for message in self.messages]


class SampleWriter:
    """Composes samples of about a wanted number of tokens from photos and documents."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, documents: list[Document], mean_length: float) -> None:
        """
        Args:
            tokenizer: Counts tokens.
            documents: Text to quote and to draw on pages.
            mean_length: Mean of the lengths that will be asked for.
        """
        self._tokenizer = tokenizer
        self._documents = documents
        self._mean_length = mean_length
        self._line_tokens = [
            [len(encode_text(tokenizer, line + "\n")) for line in document.lines] for document in documents
        ]

    def write(self, num_tokens: int, rng: random.Random) -> RawSample:
        """A sample of about `num_tokens` tokens, visual tokens included, of a kind that fits the length."""
        weights = next(w for bound, w in KIND_WEIGHTS if num_tokens <= bound * self._mean_length)
        writers = (self._write_caption, self._write_chat, self._write_page, self._write_text)
        return rng.choices(writers, weights)[0](num_tokens, rng)

    def _write_caption(self, num_tokens: int, rng: random.Random) -> RawSample:
        photo = rng.choice(PHOTOS)
        sample = RawSample()
        if num_tokens > 0.5 * self._mean_length and rng.random() < 0.5:
            sample.add_turn("<image>\n" + rng.choice(DETAIL_PROMPTS), photo.details)
        else:
            sample.add_turn("<image>\n" + rng.choice(CAPTION_PROMPTS), photo.caption)
        return self._add_photos(sample, [photo], num_tokens, rng)

    def _write_chat(self, num_tokens: int, rng: random.Random) -> RawSample:
        """Several questions about one photo, or about two."""
        photos = rng.sample(PHOTOS, 2 if num_tokens > self._mean_length and rng.random() < 0.3 else 1)
        sample = RawSample()
        if len(photos) == 2:
            answer = f"First: {photos[0].caption} Second: {photos[1].caption}"
            sample.add_turn("<image>\n<image>\nWhat do the two pictures show?", answer)
            turns = []
            for name, photo in zip(("first", "second"), photos):
                turns += [(f"In the {name} picture: {question}", answer) for question, answer in photo.questions]
        else:
            question, answer = photos[0].questions[0]
            sample.add_turn("<image>\n" + question, answer)
            turns = [(rng.choice(DETAIL_PROMPTS), photos[0].details), *photos[0].questions[1:]]
        rng.shuffle(turns)
        for question, answer in turns:
            if self._count(sample) > CHAT_TEXT_SHARE * num_tokens:
                break
            sample.add_turn(question, answer)
        return self._add_photos(sample, photos, num_tokens, rng)

    def _write_page(self, num_tokens: int, rng: random.Random) -> RawSample:
        _, _, lines = self._quote(round(PAGE_TEXT_SHARE * num_tokens), rng)
        question = "<image>\n" + rng.choice(PAGE_PROMPTS)
        draft = RawSample()
        draft.add_turn(question, "\n".join(lines))
        num_visual = max(MIN_VISUAL_TOKENS, num_tokens - self._count(draft))
        page, transcript = render_page(" ".join(lines), num_visual * PIXELS_PER_TOKEN, rng)
        sample = RawSample(images=[("png", page)])
        sample.add_turn(question, transcript)
        return sample

    def _write_text(self, num_tokens: int, rng: random.Random) -> RawSample:
        """Quotes from documents; long samples in up to four turns."""
        num_turns = rng.randint(1, 4) if num_tokens > self._mean_length else 1
        sample = RawSample()
        for turns_left in range(num_turns, 0, -1):
            budget = (num_tokens - self._count(sample)) // turns_left - QUESTION_TOKENS
            document, first_line, lines = self._quote(budget, rng)
            sample.add_turn(f"Quote {document.title} from line {first_line + 1}.", "\n".join(lines))
        return sample

    def _quote(self, num_tokens: int, rng: random.Random) -> tuple[Document, int, list[str]]:
        """(document, first line, lines) of a passage of about `num_tokens` tokens, the best of some draws."""
        best, best_miss = (0, 0, 1), float("inf")
        for _ in range(NUM_DRAWS):
            index = rng.randrange(len(self._documents))
            costs = self._line_tokens[index]
            first = rng.randrange(len(costs)) if rng.random() < 0.5 else 0
            total, end = costs[first], first + 1
            while end < len(costs) and total + costs[end] <= num_tokens:
                total += costs[end]
                end += 1
            miss = abs(num_tokens - total)
            if miss < best_miss:
                best, best_miss = (index, first, end), miss
        index, first, end = best
        return self._documents[index], first, list(self._documents[index].lines[first:end])

    def _add_photos(self, sample: RawSample, photos: list[Photo], num_tokens: int, rng: random.Random) -> RawSample:
        """Gives the photos what the text has left of the tokens."""
        rest = num_tokens - self._count(sample)
        shares = [1.0] if len(photos) == 1 else [share := rng.uniform(0.3, 0.7), 1 - share]
        for photo, share in zip(photos, shares):
            num_visual = max(MIN_VISUAL_TOKENS, round(share * rest))
            sample.images.append(("jpg", crop_to(photo, num_visual * PIXELS_PER_TOKEN, rng)))
        return sample

    def _count(self, sample: RawSample) -> int:
        """Tokens of the messages, with no visual tokens yet."""
        num_media = sum(text.count("<image>") for text in sample.texts())
        return len(render_chat(self._tokenizer, sample.messages, [0] * num_media)[0]) if sample.messages else 0
