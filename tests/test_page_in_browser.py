"""The HTML page in a real browser, light and dark, wide and narrow.

Only where there is a Chromium or Chrome; `test_reporting.py` reads the page everywhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import reported_data

from fa_inductor.reporting.page import page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed"
)

# What the browser has made of the page, told in the title. The page itself has no script.
PROBE = """<script>
const colour = getComputedStyle(document.body).backgroundColor;
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
const asked = performance.getEntriesByType("resource").length;
document.title = JSON.stringify([colour, dark, wide, asked]);
</script></body>"""


def _shown(folder: Path, *flags: str, width: int = 1300) -> tuple[str, str]:
    """(what the probe found, the errors that the browser logged)."""
    text = page(reported_data.report(Path("/home/user/project")), Path("/home/user/project"))
    assert "<script" not in text
    file = folder / "page.html"
    file.write_text(text.replace("</body>", PROBE))
    process = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"),
            *(f"--window-size={width},900", *flags, file.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "HOME": str(folder)},
    )
    (title,) = re.findall(r"<title>(.*)</title>", process.stdout)
    return title, "\n".join(line for line in process.stderr.splitlines() if "CONSOLE" in line)


def test_it_is_light_where_light_is_preferred(tmp_path: Path) -> None:
    title, errors = _shown(tmp_path)
    assert (title, errors) == ('["rgb(255, 255, 255)",false,false,0]', "")


def test_it_is_dark_where_dark_is_preferred_and_fits_a_telephone(tmp_path: Path) -> None:
    dark = "--blink-settings=preferredColorScheme=0"
    title, errors = _shown(tmp_path, dark, width=500)
    assert (title, errors) == ('["rgb(15, 19, 24)",true,false,0]', "")
