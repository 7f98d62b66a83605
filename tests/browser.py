"""Pages in a real browser.

Needs playwright (of the dev extra) and a Chromium that the machine already has; neither is downloaded here.
"""

import shutil
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
READABLE = 4.5  # the contrast that WCAG asks of body text


class Visit:
    """An open page, with what went wrong on it and what it asked for; `context`: further options of its window."""

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
        """Every text that the script finds, with its contrast to what is behind it, can be read."""
        found = self.page.evaluate(script)
        assert len(found) > 10
        assert [what for contrast, what in found if contrast < READABLE] == []

    def close(self) -> None:
        self.context.close()
