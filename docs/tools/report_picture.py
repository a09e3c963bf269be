"""Photograph a report: `python docs/tools/report_picture.py RUN...` writes docs/assets/report.png.

Needs the extra `report`, the package playwright, and Chromium.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from flatout.cli.commands.report import report

PICTURE = Path(__file__).parents[1] / "assets" / "report.png"
WIDTH, HEIGHT = 1120, 968
COLORS = 48
"""Few colours make a small file."""


def photograph(page: Path) -> bytes:
    """Return the top of a page as PNG."""
    with sync_playwright() as kit:
        browser = kit.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]")
        tab.wait_for_timeout(500)
        taken = tab.screenshot()
        browser.close()
    return taken


def main() -> None:
    """Write the picture of a report about the runs that the command line names."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        report(sys.argv[1:] or None, out=page)
        taken = photograph(page)
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLORS).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
