"""The report in a real browser without a network: no requests, no errors, working animation, readable text.

See tests/browser.py for the requirements.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from cedd.apps.report.pages import comparison_page
from cedd.apps.report.records import BoundFigures, ComparedRun, RunComparison
from cedd.evaluation.baselines import Baseline
from tests.browser import Visit as OpenPage
from tests.browser import needs_chromium

pytestmark = needs_chromium

WIDE, PHONE = (1100, 900), (390, 844)

CONTRASTS = """() => {
  const shine = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/rgba\\(.*, 0\\)/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("h1, h2, p, td, dd, .fixed, .broken, .missed, .changed, .filled, code")]
    .filter(node => node.textContent.trim())
    .map(node => {
      const [a, b] = [shine(getComputedStyle(node).color), shine(ground(node))].sort((x, y) => y - x);
      return [(a + .05) / (b + .05), node.tagName + "." + node.className + ": " + node.textContent.slice(0, 30)];
    });
}"""


class Visit(OpenPage):
    """An open local file."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light", size: tuple[int, int] = WIDE) -> None:
        super().__init__(browser, path.as_uri(), size, scheme, offline=True)
        self.page.goto(self.address)

    def check(self, path: Path) -> None:
        assert self.complaints == []
        assert self.requests == [path.as_uri()]


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    figures = BoundFigures(3.2, (3.1, 3.3), 0.05, 9.2, 2.2, 100, 6400, 4, False)
    bounds = [(100, 4.0, 0.1), (200, 3.2, 0.1)]
    first = ComparedRun("runs/first", "bayes-star", "roulette (p_m = 0.95)", 1_000_000, 200, bounds, figures, None)
    second = ComparedRun(
        "runs/second/with/a/name/that/is/long", "cedd-star", "uniform", 900, 200, bounds, figures, (-0.1, -0.12, -0.08)
    )
    compared = RunComparison([first, second], [Baseline("unigram", 4.6, 0.01, "")])
    path = tmp_path / "comparison.html"
    path.write_text(comparison_page(compared, "cedd report"), "utf-8")
    return path


def test_animation_plays_pauses_and_steps(browser: Any, fast_run: Path):
    path = fast_run / "report.html"
    visit = Visit(browser, path)
    frame = visit.page.frame_locator("iframe")
    slider, play = frame.locator("#step"), frame.locator("#play")
    frame.locator("#text").scroll_into_view_if_needed()
    visit.page.wait_for_function("() => +document.querySelector('iframe').contentDocument.all.step.value > 1")
    play.click()
    assert play.inner_text() == "play"
    at = int(slider.input_value())
    visit.page.wait_for_timeout(400)
    assert int(slider.input_value()) == at  # paused
    frame.locator("body").press("ArrowLeft")
    assert int(slider.input_value()) == at - 1
    last = int(slider.get_attribute("max") or 0)
    slider.fill(str(last))
    shown = re.sub(r"\s", "", frame.locator("#text").inner_text())
    assert shown == re.sub(r"\s", "", visit.page.locator("#samples .card").first.inner_text())
    visit.check(path)
    visit.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_readable_in_light_and_dark(browser: Any, fast_run: Path, comparison: Path, scheme: str):
    grounds: list[str] = []
    for path in (fast_run / "report.html", comparison):
        visit = Visit(browser, path, scheme)
        visit.check_contrasts(CONTRASTS)
        grounds.append(visit.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        visit.check(path)
        visit.close()
    light = sum(map(int, re.findall(r"\d+", grounds[0])[:3])) > 384
    assert light == (scheme == "light")


def test_pages_fit_phone_screen(browser: Any, fast_run: Path, comparison: Path):
    """Nothing is wider than the screen, except for boxes that scroll by themselves."""
    too_wide = """() => [...document.querySelectorAll("body *")]
      .filter(node => !node.closest(".scroll, svg") && node.getBoundingClientRect().right > innerWidth + 1)
      .map(node => node.tagName + "." + node.className)"""
    for path in (fast_run / "report.html", comparison):
        visit = Visit(browser, path, size=PHONE)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        assert visit.page.evaluate(too_wide) == []
        visit.check(path)
        visit.close()


def test_comparison_marks_significantly_better_run(browser: Any, comparison: Path):
    visit = Visit(browser, comparison)
    better = visit.page.locator("td.better")
    assert better.inner_text() == "-0.1000 [-0.1200, -0.0800]"
    edge = visit.page.evaluate("() => document.querySelector('.chart').getBoundingClientRect().right")
    for label in visit.page.locator(".chart .label").all():
        box = label.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= edge  # names end inside the picture
    visit.close()
