"""The page in a real browser: every pane, two window sizes, light and dark, and a lost server.

See tests/browser.py for the requirements.
"""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cedd.apps.serve.limits import Limits
from cedd.apps.serve.registry import ModelRegistry
from cedd.apps.serve.scheduler import Scheduler
from tests.apps.serve.servers import Handlers, Server, bind_socket, free_port, make_app, served, until
from tests.browser import Visit as OpenPage
from tests.browser import needs_chromium

pytestmark = [pytest.mark.slow, needs_chromium]

PHONE, WIDE = (360, 740), (1600, 1000)
SIZES = pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "wide"])

# Every text with its colour and the colours behind it, down to the first that hides what is below.
CONTRASTS = """() => {
  const parse = colour => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const shine = rgb => { const [r, g, b] = rgb.map(v => v / 255)
      .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const ground = node => { for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor); if (colour[3] === 1) return colour.slice(0, 3); }
    return [255, 255, 255]; };
  return [...document.querySelectorAll("body *")]
    .filter(node => node.offsetParent && !node.closest("[aria-hidden=true], .hidden, :disabled, .mask")
      && [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()))
    .map(node => {
      const own = parse(getComputedStyle(node).color).slice(0, 3);
      const [a, b] = [shine(own), shine(ground(node))].sort((x, y) => y - x);
      return [(a + .05) / (b + .05), node.tagName + "." + node.className + ": " + node.textContent.slice(0, 30)];
    });
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, [role=tab], [role=group]")]
  .filter(node => node.offsetParent)
  .filter(node => !(node.getAttribute("aria-label") || node.textContent.trim() && !node.matches("select, textarea")
    || (node.labels && node.labels.length) || document.getElementById(node.getAttribute("aria-labelledby"))))
  .map(node => node.outerHTML.slice(0, 80))"""
REPEATED_IDS = """() => { const ids = [...document.querySelectorAll("[id]")].map(node => node.id);
  return ids.filter((id, place) => ids.indexOf(id) !== place); }"""
TOO_WIDE = """() => [...document.querySelectorAll("body *")].filter(node => node.offsetParent
  && !node.closest(".hidden") && node.getBoundingClientRect().right > innerWidth + 1)
  .map(node => node.tagName + "#" + node.id)"""


class Visit(OpenPage):
    """An open page of the server."""

    def __init__(self, browser: Any, address: str, size: tuple[int, int] = WIDE, scheme: str = "light") -> None:
        super().__init__(browser, address, size, scheme, reduced_motion="reduce")
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page.goto(address)
        self.until("() => document.getElementById('w-model').options.length > 0")

    def until(self, script: str, seconds: float = 30.0) -> None:
        """Wait until a script returns true; the page's policy forbids Playwright's own function for it."""

        def asked() -> bool:
            self.page.wait_for_timeout(30)
            return bool(self.page.evaluate(script))

        until(asked, seconds)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).text_content() or ""

    def check(self) -> None:
        """Check for errors, requests to other hosts, unlabelled controls, repeated ids, overflow and low contrast."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith((self.address, "data:"))] == []
        assert self.page.evaluate(NAMELESS) == []
        assert self.page.evaluate(REPEATED_IDS) == []
        assert self.page.evaluate(TOO_WIDE) == []
        self.check_contrasts(CONTRASTS)

    def write(self, **fields: str) -> None:
        for name, value in {"length": "20", "steps": "8", "seed": "7", **fields}.items():
            self.page.fill(f"#w-{name}", value)
        self.page.click("#w-go")
        self.page.wait_for_selector("#w-replay:not([hidden])")


@pytest.fixture
def visit(browser: Any, server: tuple[str, object]) -> Iterator[Any]:
    made: list[Visit] = []

    def open_page(size: tuple[int, int] = WIDE, scheme: str = "light", path: str = "") -> Visit:
        made.append(Visit(browser, server[0] + path, size, scheme))
        made[-1].address = server[0]
        return made[-1]

    yield open_page
    for one in made:
        one.context.close()


@SIZES
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_write_shows_denoising_and_its_history(visit: Any, size: tuple[int, int], scheme: str):
    here = visit(size, scheme)
    assert here.text("#w-text") == "Press Write to start."
    here.check()
    here.write(prompt="the ")
    final, steps = here.text("#w-text"), int(here.page.locator("#w-at").get_attribute("max"))
    assert final.startswith("the ")
    assert len(final) == 24
    assert steps == 9
    assert here.text("#w-seeded") == "7"
    assert here.text("#w-step") == "final denoising step"
    here.page.fill("#w-at", "8")
    assert here.text("#w-step") == "8 of 8"  # the requested number
    assert here.page.locator("#w-text .made").count() == 20
    here.page.fill("#w-at", "0")
    assert here.text("#w-text") == "the " + "\u2591" * 20  # all masked
    assert here.text("#w-masked") == "20"
    here.page.locator("#w-at").focus()
    for _ in range(steps):
        here.page.keyboard.press("ArrowRight")
    assert here.text("#w-text") == final
    replaced = int(here.text("#w-replaced"))
    assert replaced >= 0
    here.page.click("#w-copy")
    assert here.page.evaluate("() => navigator.clipboard.readText()") == final
    here.page.click("#w-play")
    here.until("() => document.getElementById('w-play').textContent === 'Pause'")
    here.until("() => document.getElementById('w-play').textContent === 'Play'")
    assert here.text("#w-text") == final
    here.check()


def test_temperature_and_top_p_of_model_are_shown_and_sent(
    browser: Any, registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(registry["small"].folder.config, "sampling", {"temperature": 0.9, "top_p": 0.8})
    with served(ModelRegistry({"small": registry["small"], "masks": registry["masks"]})) as (address, _):
        here, sent = Visit(browser, address), list[Any]()
        here.page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
        assert [here.page.input_value(f"#w-{name}") for name in ("temperature", "top_p")] == ["0.9", "0.8"]
        here.write(top_p="0.5")
        assert (sent[-1]["temperature"], sent[-1]["top_p"]) == (0.9, 0.5)
        here.page.select_option("#w-model", "masks")
        assert [here.page.input_value(f"#w-{name}") for name in ("temperature", "top_p")] == ["1", "1"]
        here.context.close()


HUES = "() => [...document.querySelectorAll('#w-text .made')].map(node => +node.style.getPropertyValue('--hue'))"
TITLES = "() => [...document.querySelectorAll('#w-text .made')].map(node => node.title)"


def test_tokens_are_coloured_by_step_or_certainty(visit: Any):
    here = visit(PHONE, "dark")
    here.write(prompt="the ")
    by_step, said = here.page.evaluate(HUES), here.page.evaluate(TITLES)
    assert len(by_step) == 20
    assert [250 + 135 * int(title.split()[1].rstrip(",")) / 9 for title in said] == pytest.approx(by_step)
    assert "first step" in here.text("#w-scale")
    here.page.select_option("#w-colour", "certainty")
    sure = [int(title.split(", ")[1].strip("<> %")) / 100 for title in said]
    assert [385 - 135 * p for p in sure] == pytest.approx(here.page.evaluate(HUES), abs=2)
    assert "probability 0" in here.text("#w-scale")
    here.page.fill("#w-at", "3")
    assert 0 < len(here.page.evaluate(HUES)) < 20  # also at an intermediate step
    here.check()
    again = visit(path=here.page.evaluate("() => location.hash"))
    again.page.wait_for_selector("#w-replay:not([hidden])")
    assert again.page.input_value("#w-colour") == "certainty"
    odd = visit(path=here.page.evaluate("() => location.hash").replace("certainty", "toString"))
    odd.page.wait_for_selector("#w-replay:not([hidden])")
    odd.check()


def test_link_reproduces_text(visit: Any):
    first = visit()
    first.write(prompt="ab & <b>", seed="")
    link = first.page.evaluate("() => location.hash")
    again = visit(path=link)
    again.page.wait_for_selector("#w-replay:not([hidden])")
    assert again.text("#w-text") == first.text("#w-text")
    assert again.text("#w-seeded") == first.text("#w-seeded")
    first.page.click("#w-link")
    assert first.page.evaluate("() => navigator.clipboard.readText()").endswith(link)


@SIZES
def test_fill_shows_alternatives_of_blanks(visit: Any, size: tuple[int, int]):
    here = visit(size)
    here.page.click("#tab-fill")
    here.page.fill("#f-text", "the ____ cat ____{3}.")
    here.page.fill("#f-n", "2")
    here.page.click("#f-go")
    here.page.wait_for_selector(".gap")
    assert here.page.locator("#f-texts li").count() == 2
    assert here.page.locator(".gap").count() == 4
    here.page.locator(".gap").first.focus()
    tip = here.text("#tip")
    assert "of 2" in tip
    assert "%" in tip
    assert here.page.locator("#tip .others").count() == 4  # a line for each token of the gap
    assert here.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    here.check()
    here.page.keyboard.press("Escape")
    assert here.page.locator("#tip").is_hidden()
    here.page.fill("#f-text", "no gap")
    here.page.keyboard.press("Control+Enter")
    here.until("() => document.getElementById('f-problem').textContent.includes('no blank to fill')")
    here.page.click("#tab-write")
    here.page.fill("#w-prompt", "a" * 20)
    here.page.fill("#w-length", "32")
    here.page.keyboard.press("Control+Enter")
    here.until("() => document.getElementById('w-problem').textContent !== ''")
    said = "Length must be an integer from 1 to 12: the prompt has 20 tokens and the model's context is 32."
    assert here.text("#w-problem") == said


@SIZES
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_corrections_are_marked_and_can_be_undone(
    visit: Any, registry: ModelRegistry, size: tuple[int, int], scheme: str
):
    here = visit(size, scheme)
    here.page.click("#tab-correct")
    text = "\U0001f600 the cat sat on the mat"
    here.page.fill("#c-text", text)
    wanted = registry["small"].correct(text)
    assert wanted.changes  # the network is random and finds errors everywhere
    here.until("() => document.querySelectorAll('#c-fixed button').length > 0")
    assert here.text("#c-fixed") == wanted.text
    assert here.page.locator("#c-under .changed").count() == len(wanted.changes)
    first = here.page.locator("#c-fixed button").first
    first.hover()
    assert "Probability of an error" in here.text("#tip")
    first.click()
    change = wanted.changes[0]
    start, stop = change.corrected_span
    back = wanted.text[:start] + change.before + wanted.text[stop:]
    assert here.text("#c-fixed") == back
    here.page.click("#c-copy")
    assert here.page.evaluate("() => navigator.clipboard.readText()") == back
    here.page.locator("#c-fixed button").first.click()
    assert here.text("#c-fixed") == wanted.text
    here.check()


def test_noise_grows_with_t_and_two_samplers_run_side_by_side(visit: Any):
    here = visit()
    here.page.click("#tab-noise")
    here.page.fill("#n-text", "the cat sat on the mat")
    here.until(
        "() => document.querySelectorAll('#n-all .card').length === 4"
        " && document.querySelector('#n-all .text').children.length === 22"
    )
    for t in ("0", "100"):
        here.page.locator("#n-t").evaluate(
            "(node, t) => { node.value = t; node.dispatchEvent(new Event('input')); }", t
        )
        shown = here.page.evaluate("() => [...document.querySelectorAll('#n-all .text')].map(node => node.textContent)")
        if t == "0":
            assert shown == ["the cat sat on the mat"] * 4
    notes = here.page.evaluate("() => [...document.querySelectorAll('#n-all .note')].map(node => node.textContent)")
    assert notes[0] == "0 kept, 0 random, 22 masked"
    assert notes[1].endswith("0 masked")
    for name in ("length", "steps"):
        here.page.fill(f"#s-{name}", "12")
    here.page.click("#s-go")
    here.until("() => !document.getElementById('s-go').disabled")
    assert [len(here.text(f"#s-text-{side}")) for side in (0, 1)] == [12, 12]
    assert "step 12, t = 0.00" in here.text("#s-note-1")
    here.check()


def test_tabs_support_keyboard_navigation(visit: Any):
    here = visit()
    here.page.locator("#tab-write").focus()
    here.page.keyboard.press("ArrowLeft")
    assert here.page.locator("#noise").is_visible()
    here.page.keyboard.press("Home")
    assert here.page.locator("#write").is_visible()
    assert here.page.evaluate("() => document.activeElement.id") == "tab-write"
    assert here.page.evaluate("() => [...document.querySelectorAll('[role=tab]')].map(tab => tab.tabIndex)") == [
        0,
        -1,
        -1,
        -1,
    ]


def test_text_is_never_interpreted_as_markup(visit: Any):
    here = visit()
    nasty = "<script>bad=1</script><img src=x onerror=bad=1> \u202eabc \u0007"
    here.page.click("#tab-correct")
    here.page.fill("#c-text", nasty)
    here.until(
        "() => document.getElementById('c-fixed').textContent.includes('27E8') === false"
        " && document.getElementById('c-fixed').textContent.length > 20"
    )
    assert "\u27e8202E\u27e9" in here.text("#c-fixed")
    assert "\u2407" in here.text("#c-fixed")
    assert "\u202e" not in here.text("#c-fixed")
    here.page.click("#tab-write")
    here.page.fill("#w-prompt", "<b>")
    here.write()
    assert here.text("#w-text").startswith("<b>")
    assert here.page.evaluate("() => document.querySelectorAll('main script, main img, main b:not([id])').length") == 0
    assert here.page.evaluate("() => typeof bad") == "undefined"
    here.check()


def test_lost_server_is_reported_and_reconnected(browser: Any, registry: ModelRegistry):
    port = free_port()

    def begin() -> tuple[Server, threading.Thread]:
        scheduler, begun = Scheduler(Limits()), threading.Event()
        server = Server(make_app(Handlers(registry, scheduler, "test")), scheduler, begun.set)
        thread = threading.Thread(target=server.run, args=([bind_socket("127.0.0.1", port)],), daemon=True)
        thread.start()
        assert begun.wait(10)
        return server, thread

    def end(server: Server, thread: threading.Thread) -> None:
        server.should_exit = True
        thread.join(20)

    first = begin()
    here = Visit(browser, f"http://127.0.0.1:{port}/")
    end(*first)
    here.page.click("#w-go")
    here.until("() => !document.getElementById('lost').hidden")
    assert "does not respond" in here.text("#w-problem")
    second = begin()
    here.until("() => document.getElementById('lost').hidden")
    here.write()
    assert here.text("#w-problem") == ""
    here.context.close()
    end(*second)
