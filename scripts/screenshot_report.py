"""Renders a report page of ``kimi-gguf eval --html`` in a real browser, light and dark, wide and narrow.

    python scripts/screenshot_report.py REPORT.html --out DIR

Needs Chromium or Chrome; says so and ends with 2 when there is none. Fails when a picture is blank, that is when the
page drew nothing.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
VIEWS = {"light": (1000, False), "dark": (1000, True), "narrow": (500, False)}
HEIGHT = 3000


def find_browser() -> str | None:
    """Path of the first browser that is installed."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def shoot(browser: str, page: Path, picture: Path, width: int, dark: bool) -> None:
    """Render ``page`` into a PNG."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"),
            *(("--blink-settings=preferredColorScheme=0",) if dark else ()),
            f"--user-data-dir={profile}",
            f"--window-size={width},{HEIGHT}",
            f"--screenshot={picture}",
            page.resolve().as_uri(),
        ]
        subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def colours(picture: Path) -> int:
    """How many distinct colours the first 20,000 pixels of each of some rows hold; 1 is a blank picture."""
    data = picture.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    body, at = b"", 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            body += data[at + 8 : at + 8 + size]
        at += size + 12
    rows = zlib.decompress(body)
    channels = 4 if kind == 6 else 3
    stride = 1 + width * channels * depth // 8
    return len({rows[y * stride + 1 : y * stride + stride] for y in range(0, height, 7)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        print(f"no browser found; install one of {', '.join(BROWSERS)}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (width, dark) in VIEWS.items():
        picture = options.out / f"{options.page.stem}-{name}.png"
        shoot(browser, options.page, picture, width, dark)
        different = colours(picture)
        print(f"{picture}: {different} different rows of pixels")
        if different < 20:
            print(f"{picture} is blank", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
