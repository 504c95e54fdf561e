"""Document pages drawn from text, with exactly what is on the page as transcript."""

from __future__ import annotations

import io
import math
import random

from PIL import Image, ImageDraw, ImageFont

#: Letter heights in pixels, the largest that fits is taken.
FONT_SIZES = range(22, 8, -1)
LINE_SPACING = 1.25
#: White rim as a share of the page's width.
MARGIN = 0.05


def render_page(text: str, num_pixels: int, rng: random.Random) -> tuple[bytes, str]:
    """Draws text on a white page of about `num_pixels` pixels, in Pillow's own font.

    Args:
        text: At least one word; set as one paragraph.
        num_pixels: Area of the page.
        rng: Chooses the shape, from square to A4 upright.

    Returns:
        The PNG file, and the lines that are on it. Text that does not fit at the smallest letters is on
        neither.
    """
    aspect_ratio = rng.uniform(1.0, math.sqrt(2))
    width = round(math.sqrt(num_pixels / aspect_ratio))
    height = round(width * aspect_ratio)
    margin = max(2, round(width * MARGIN))
    words = text.split()
    for font_size in FONT_SIZES:
        font = ImageFont.load_default(font_size)
        num_lines = int((height - 2 * margin) / (font_size * LINE_SPACING))
        wrapped = _wrap(words, font, width - 2 * margin)
        if len(wrapped) <= num_lines:
            break
    wrapped = wrapped[: max(1, num_lines)]
    page = Image.new("L", (width, height), 255)
    draw = ImageDraw.Draw(page)
    for row, line in enumerate(wrapped):
        draw.text((margin, margin + row * font_size * LINE_SPACING), line, font=font, fill=0)
    out = io.BytesIO()
    page.save(out, format="PNG")
    return out.getvalue(), "\n".join(wrapped)


def _wrap(words: list[str], font: ImageFont.FreeTypeFont, max_width: int) -> list[str]:
    """Lines of at most `max_width` pixels; words that are wider than that are broken anywhere."""
    lines = []
    current = ""
    for word in words:
        longer = f"{current} {word}".lstrip()
        if font.getlength(longer) <= max_width:
            current = longer
            continue
        if current:
            lines.append(current)
        *full, current = _split_word(word, font, max_width)
        lines += full
    return [*lines, current]


def _split_word(word: str, font: ImageFont.FreeTypeFont, max_width: int) -> list[str]:
    """The word in pieces that fit; a single letter always counts as fitting."""
    pieces = [word[0]]
    for letter in word[1:]:
        if font.getlength(pieces[-1] + letter) <= max_width:
            pieces[-1] += letter
        else:
            pieces.append(letter)
    return pieces
