"""The page in a real browser (`make browser`); screenshots go to `build/screenshots`."""

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.support import ROOT, Server
from tests.server.test_openai import ROME, calls_text

pytestmark = pytest.mark.browser
SHOTS = ROOT / "build" / "screenshots"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 820}, color_scheme="light")
    problems: list[str] = []
    opened = context.new_page()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.extend(complaints(message)))
    opened.on("dialog", lambda dialog: problems.append("dialog") or dialog.dismiss())
    opened.on("request", lambda r: r.url.startswith(server.url) or problems.append(r.url))
    opened.goto(server.url)
    yield opened
    context.close()
    assert not problems


def complaints(message: Any) -> list[str]:
    """Errors in the console; an answer with an error status is no fault of the page."""
    is_status = message.text.startswith("Failed to load resource")
    return [message.text] if message.type == "error" and not is_status else []


def send(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.keyboard.press("Enter")


def finished(page: Any) -> None:
    page.wait_for_selector("#send:text-is('Send')")
    page.wait_for_selector(".message.assistant:last-of-type .actions")


def shot(page: Any, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.wait_for_timeout(2500)  # the plots want a few samples
    page.screenshot(path=SHOTS / f"{name}.png")


def test_a_conversation_and_how_it_looks(page: Any) -> None:
    shot(page, "empty")
    send(page, "What kinds of layers are there?")
    finished(page)
    assert page.locator(".md h2").inner_text() == "Layers"
    assert page.locator(".md td").count() == 9
    assert page.locator(".md ol li").count() == 2
    assert "def step" in page.locator(".md pre code").inner_text()
    assert page.locator(".md pre .k").first.inner_text() == "def"
    assert page.locator(".md a").get_attribute("rel") == "noopener noreferrer nofollow"
    reasoning = page.locator("details.reasoning")
    assert reasoning.get_attribute("open") is None
    assert not page.locator("details.reasoning .inside").is_visible()
    reasoning.locator("summary").click()
    assert "I will be brief" in page.locator("details.reasoning .inside").inner_text()
    reasoning.locator("summary").click()
    shot(page, "light")
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    shot(page, "dark")
    page.set_viewport_size({"width": 390, "height": 780})
    shot(page, "phone")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390
    page.click("#menu")
    page.wait_for_selector("#side.open")
    shot(page, "phone-side")
    page.click("#veil", position={"x": 380, "y": 400})
    page.click("#options")
    shot(page, "phone-settings")


def test_it_streams_and_stops(page: Any) -> None:
    send(page, "SAY </think>" + "word " * 400 + "\nMS 20")
    page.wait_for_selector(".md")
    first = page.locator(".md").inner_text()
    page.wait_for_timeout(600)
    assert len(page.locator(".md").inner_text()) > len(first)
    page.keyboard.press("Escape")
    finished(page)
    assert "stopped" in page.locator(".note").inner_text()
    text = page.locator(".md").inner_text()
    page.wait_for_timeout(300)
    assert page.locator(".md").inner_text() == text


def test_a_reload_keeps_everything(page: Any) -> None:
    send(page, "SAY a</think>**kept**")
    finished(page)
    page.click("#mode")
    page.reload()
    assert page.locator(".md strong").inner_text() == "kept"
    assert page.locator("#list .entry").count() == 1
    assert page.locator("#mode").get_attribute("aria-pressed") == "false"
    page.keyboard.press("Alt+n")
    assert page.locator(".empty").is_visible()
    page.locator("#list .open").first.click()
    assert page.locator(".md strong").inner_text() == "kept"
    page.locator("#list .remove").first.click()
    page.reload()
    assert page.locator("#list .entry").count() == 0


@pytest.mark.parametrize(
    "evil",
    [
        "<script>window.hit=1</script>",
        "<img src=x onerror=window.hit=1>",
        "[x](javascript:window.hit=1)",
        "[x](data:text/html,<script>window.hit=1</script>)",
        "```html\\n<script>window.hit=1</script>\\n```",
        '"><svg onload=window.hit=1>',
        "| <b onclick=window.hit=1>a</b> |\\n|---|\\n| <script>window.hit=1</script> |",
        "`<script>window.hit=1</script>`",
    ],
)
def test_what_a_model_writes_is_text(page: Any, evil: str) -> None:
    send(page, f"SAY {evil}</think>{evil}")
    finished(page)
    page.locator("details.reasoning summary").click()
    for link in page.locator(".md a").all():
        assert link.get_attribute("href").startswith(("http", "mailto:"))
    assert page.locator("#log script, #log img, #log svg, #log b").count() == 0
    assert page.evaluate("window.hit") is None
    said = page.locator(".message.user .text").inner_text()
    assert said == f"SAY {evil}</think>{evil}"


def test_edit_and_regenerate(page: Any) -> None:
    send(page, "SAY x</think>first")
    finished(page)
    page.click("text=Regenerate")
    finished(page)
    assert page.locator(".message").count() == 2
    page.keyboard.press("ArrowUp")
    assert page.input_value("#input") == "SAY x</think>first"
    send(page, "SAY x</think>second")
    finished(page)
    assert page.locator(".md").inner_text() == "second"
    assert page.locator(".message").count() == 2


def test_tool_calls_are_shown_and_answered(page: Any) -> None:
    page.click("#options")
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    page.fill("[name=tools]", "{oops")
    page.click("button[value=save]")
    assert "Tools" in page.locator("#settings-error").inner_text()
    page.fill("[name=tools]", json.dumps([tool]))
    page.click("button[value=save]")
    send(page, f"SAY x</think>{calls_text(ROME)}")
    page.wait_for_selector(".result input")
    assert "Calls get_weather" in page.locator("details.call summary").inner_text()
    assert '"city": "Rome"' in page.locator("details.call pre").inner_text()
    page.wait_for_function("document.activeElement.matches('.result input')")
    send(page, "not yet")  # a result must come first
    assert page.locator(".message.user").count() == 1
    assert page.input_value("#input") == "not yet"
    page.fill(".result input", "sunny")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant:nth-of-type(3), .message.assistant >> nth=1")
    assert "Result given" in page.locator("details.call summary").nth(1).inner_text()


def test_errors_are_shown(page: Any) -> None:
    send(page, "x\nREFUSE not today")
    page.wait_for_selector(".failed")
    assert "not today" in page.locator(".failed").inner_text()
    assert re.search(r"Regenerate", page.locator(".message.assistant").inner_text())


def test_figures_move(page: Any) -> None:
    send(page, "SAY </think>" + "word " * 100 + "\nMS 10")
    page.wait_for_function("document.querySelector('.figure b').textContent > '0'")
    finished(page)
    assert page.locator(".bar").count() == 3
    assert page.locator(".figure .line").first.get_attribute("d").startswith("M")


def test_keyboard_alone(page: Any) -> None:
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
    for name in ("log", "input", "mode", "send", "options"):
        assert name in seen
