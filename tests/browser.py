"""Helpers for testing pages in a real browser.

Requires Playwright (in the dev extra) and an installed Chromium; neither is downloaded.
"""

import shutil
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
MIN_CONTRAST = 4.5  # the minimum WCAG contrast for body text


class Visit:
    """An open page that records its errors and requests; `context`: further options of the browser context."""

    def __init__(self, browser: Any, address: str, size: tuple[int, int], scheme: str, **context: Any) -> None:
        view = {"width": size[0], "height": size[1]}
        self.context = browser.new_context(color_scheme=scheme, viewport=view, **context)
        self.page, self.address = self.context.new_page(), address
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def check_contrasts(self, script: str) -> None:
        """Check that every text found by the script has sufficient contrast with its background."""
        found = self.page.evaluate(script)
        assert len(found) > 10
        assert [what for contrast, what in found if contrast < MIN_CONTRAST] == []

    def close(self) -> None:
        self.context.close()
