"""Opens a page in a headless browser, where one is on the PATH."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "chrome",
    "headless_shell",
    "chromium-headless-shell",
)


def browser() -> str:
    for name in BROWSERS:
        found = shutil.which(name)
        if found:
            return found
    pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the PATH")


def run_browser(*flags: str, page: Path) -> str:
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", profile, *flags, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
