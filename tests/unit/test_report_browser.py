"""The report in a real browser, headless Chromium: nothing to complain of, every plot drawn, light and dark."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aiak_ext.reporting.inline_svg import SERIES
from aiak_ext.reporting.plots import PLOTS
from tests.unit.test_report import call, random_records, write_run

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed (Debian: chromium)")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    plain = write_run(directory / "plain", random_records(30, 2))
    balanced = write_run(directory / "balanced", random_records(30, 2, balanced=True, deferring=True))
    call(plain, balanced, "--output", directory / "report.html")
    return directory / "report.html"


def open_page(page: Path, profile: Path, *flags: str) -> str:
    """What the browser prints; fails when the page gives it something to say on the console.

    Args:
        page: The file.
        profile: A new folder for the browser's own data.
        flags: Further flags.
    """
    command = [str(CHROMIUM), *_FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    said = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    assert not said, said
    return result.stdout


def test_every_plot_is_in_the_document(page: Path, tmp_path: Path) -> None:
    document = open_page(page, tmp_path / "profile", "--dump-dom")
    assert re.findall(r'<svg[^>]* data-plot="([^"]+)"', document) == [plot.name for plot in PLOTS]
    assert document.count("<figure>") == len(PLOTS)


def test_console_messages_would_be_noticed(tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<!doctype html><script>console.error('broken')</script>")
    with pytest.raises(AssertionError, match="broken"):
        open_page(broken, tmp_path / "profile", "--dump-dom")


@pytest.mark.parametrize(("scheme", "is_dark"), [(0, True), (1, False)])
def test_light_and_dark(page: Path, tmp_path: Path, scheme: int, is_dark: bool) -> None:
    picture = tmp_path / "page.png"
    flags = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1400,6000", f"--screenshot={picture}")
    open_page(page, tmp_path / "profile", *flags)
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)
    background, count = _most_frequent(pixels)
    assert (max(background) < 64) if is_dark else (min(background) > 192)
    assert count < len(pixels)  # something is drawn on it
    drawn = (pixels == _rgb(SERIES[0])).all(axis=1).sum()
    # Dark pages have their own, lighter blue.
    assert (drawn == 0) if is_dark else (drawn > 1000)


def _most_frequent(pixels: np.ndarray) -> tuple[tuple[int, ...], int]:
    values, counts = np.unique(pixels.astype(np.int64) @ (65536, 256, 1), return_counts=True)
    value = int(values[counts.argmax()])
    return (value >> 16, value >> 8 & 255, value & 255), int(counts.max())


def _rgb(color: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(color[1:]))
