"""A real browser at a server, and what a person does in it."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.support import ROOT

SHOTS = ROOT / "build" / "screenshots"
WIDE = {"width": 1280, "height": 820}
PHONE = {"width": 390, "height": 780}


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@contextmanager
def visit(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A fresh profile at the page; errors, dialogs and requests elsewhere fail the test."""
    context = browser.new_context(viewport=WIDE, color_scheme="light", **options)
    problems: list[str] = []

    def watch(opened: Any) -> None:
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("console", lambda message: problems.extend(complaints(message)))
        opened.on("dialog", lambda dialog: problems.append("dialog") or dialog.dismiss())
        opened.on("request", lambda r: is_ours(r.url, url) or problems.append(r.url))

    context.on("page", watch)
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.goto(url)
    yield page
    context.close()
    assert not problems


def is_ours(address: str, url: str) -> bool:
    return address.startswith((url, "blob:"))


def complaints(message: Any) -> list[str]:
    """Errors in the console; an answer with an error status is no fault of the page."""
    is_status = message.text.startswith("Failed to load resource")
    return [message.text] if message.type == "error" and not is_status else []


def until(page: Any, expression: str, seconds: float = 20) -> None:
    """Until an expression is true; the page's own policy forbids Playwright to poll inside it."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(30)


def send(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def finished(page: Any) -> None:
    page.wait_for_selector("#send:text-is('Send')")
    page.wait_for_selector(".message.assistant:last-of-type .actions")


def say(page: Any, text: str) -> None:
    """Have the scripted engine answer with this text, to the end."""
    send(page, f"SAY </think>{text}")
    finished(page)


def answer(page: Any) -> str:
    return str(page.locator(".message.assistant .md").last.inner_text())


def shot(page: Any, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.wait_for_timeout(300)
    page.screenshot(path=SHOTS / f"{name}.png")


def menu(page: Any, item: str) -> None:
    page.click("#more > summary")
    page.click(f"#{item}")


def download(page: Any, item: str) -> tuple[str, str]:
    """The name and the text of a file that an entry of the menu saves."""
    with page.expect_download() as waiting:
        menu(page, item)
    file = waiting.value
    return str(file.suggested_filename), file.path().read_text(encoding="utf-8")


def stored(page: Any) -> list[Any]:
    """Every conversation as the browser keeps it."""
    names = "Object.keys(localStorage).filter((name) => name.startsWith('dsv4.chat.'))"
    texts = page.evaluate(f"{names}.map((name) => localStorage.getItem(name))")
    return [json.loads(text) for text in texts]
