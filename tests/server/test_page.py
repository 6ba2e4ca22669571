"""The page in a real browser (`make browser`): how it looks, what it shows, who can use it.

Screenshots go to `build/screenshots`.
"""

import json
import re
from typing import Any

import pytest

from tests.server.browsing import PHONE, WIDE, answer, finished, menu, say, send, shot, until, visit
from tests.server.support import ROOT, Server
from tests.server.test_openai import ROME, calls_text

pytestmark = pytest.mark.browser
STATIC = ROOT / "dsv4" / "server" / "static"


def findings(page: Any) -> list[str]:
    """What axe-core calls serious or critical, with the elements concerned."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{item['id']}: {node['html'][:150]}"
        for item in found
        if item["impact"] in ("serious", "critical")
        for node in item["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_how_it_looks_and_that_everyone_can_use_it(page: Any, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    until(page, "document.querySelectorAll('.bar').length === 3")
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    shot(page, f"{theme}-empty")
    assert findings(page) == []
    send(page, "What kinds of layers are there?")
    finished(page)
    until(page, "document.fonts.check('16px KaTeX_Main')")
    shot(page, theme)
    assert findings(page) == []
    page.click("#options")
    shot(page, f"{theme}-settings")
    assert findings(page) == []
    page.keyboard.press("Escape")
    page.click("#more > summary")
    shot(page, f"{theme}-menu")
    assert findings(page) == []
    page.keyboard.press("Escape")
    page.set_viewport_size(PHONE)
    shot(page, f"{theme}-phone")
    assert findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.click("#menu")
    page.wait_for_selector("#side.open")
    shot(page, f"{theme}-phone-side")
    assert findings(page) == []


def test_an_overview(page: Any) -> None:
    send(page, "What kinds of layers are there?")
    finished(page)
    assert page.locator(".md h2").inner_text() == "Layers"
    assert page.locator(".md td").count() == 9
    assert page.locator(".md ol li").count() == 2
    assert page.locator(".md a").get_attribute("rel") == "noopener noreferrer nofollow"
    reasoning = page.locator("details.reasoning")
    assert reasoning.get_attribute("open") is None
    assert re.fullmatch(
        r"Thought for \d+\.\d s, 9 words", reasoning.locator("summary").inner_text()
    )
    assert not reasoning.locator(".inside").is_visible()
    reasoning.locator("summary").click()
    assert "I will be brief" in reasoning.locator(".inside").inner_text()
    note = page.locator(".actions .note").last.inner_text()
    assert re.match(r"complete · \d+ tokens · [\d.]+/s · first after [\d.]+ s · 4 from the", note)


def test_the_theme_is_a_choice(page: Any) -> None:
    seen = []
    for _ in range(3):
        page.click("#theme")
        label = page.get_attribute("#theme", "aria-label")
        seen.append((label, page.evaluate("document.documentElement.dataset.theme")))
    light, dark, auto = seen
    assert light == ("Colours: light", "light")
    assert dark == ("Colours: dark", "dark")
    assert auto == ("Colours: automatic", "light")


def test_it_streams_and_stops(page: Any) -> None:
    send(page, "SAY </think>" + "word " * 400 + "\nMS 20")
    page.wait_for_selector(".md p")
    first = answer(page)
    until(page, f"document.querySelector('.md').innerText.length > {len(first) + 40}")
    page.keyboard.press("Escape")
    finished(page)
    assert "stopped by you" in page.locator(".actions .note").last.inner_text()
    text = answer(page)
    page.wait_for_timeout(300)
    assert answer(page) == text


def test_code_is_coloured(page: Any) -> None:
    say(page, "```python\\n  def f(): return 1 # one\\n```\\n```nonsense\\n<b>\\n```")
    python, other = page.locator(".md pre code").all()
    assert python.inner_text() == "  def f(): return 1 # one"
    assert python.locator(".hljs-keyword").all_inner_texts() == ["def", "return"]
    assert python.locator(".hljs-comment").inner_text() == "# one"
    assert other.inner_text() == "<b>"


def test_math_is_typeset(page: Any) -> None:
    say(page, r"Euler: $e^{i\pi} + 1 = 0$, also \(a_1\).\n\n\[\n\frac{1}{2}\n\]")
    assert page.locator(".md .katex").count() == 3
    assert page.locator(".md .katex-display").count() == 1
    assert page.locator(".md math").first.text_content().startswith("eiπ+1=0")
    fonts = "getComputedStyle(document.querySelector('.katex .mathnormal')).fontFamily"
    assert "KaTeX_Math" in page.evaluate(fonts)


@pytest.mark.parametrize("text", ["It costs $5 and $10.", r"\$a\$", "a $ b $ c", "$", "$$ x"])
def test_money_is_no_math(page: Any, text: str) -> None:
    say(page, text)
    assert page.locator(".katex").count() == 0
    assert answer(page) == text.replace("\\", "")


def test_wrong_math_is_shown_as_it_is(page: Any) -> None:
    say(page, r"$\frac{1$ and $\unknown{x}$")
    assert page.locator(".md .math code").all_inner_texts() == [r"\frac{1", r"\unknown{x}"]


def test_tables_task_lists_and_images(page: Any) -> None:
    say(
        page,
        "| left | right | mid |\\n|:--|--:|:-:|\\n| `a|b` | 2 | c |\\n\\n"
        "- [x] done\\n- [ ] open\\n- plain\\n\\n![a cat](https://example.org/cat.png)",
    )
    cells = page.locator(".md td")
    assert cells.all_inner_texts() == ["a|b", "2", "c"]
    aligned = cells.evaluate_all("cells => cells.map((cell) => getComputedStyle(cell).textAlign)")
    assert aligned == ["left", "right", "center"]
    boxes = page.locator(".md li input[type=checkbox]")
    assert boxes.evaluate_all("boxes => boxes.map((box) => box.checked)") == [True, False]
    assert page.locator(".md img").count() == 0
    image = page.locator(".md a")
    assert image.inner_text() == "Image: a cat"
    assert image.get_attribute("href") == "https://example.org/cat.png"


def test_a_link_is_completed_by_a_later_line(page: Any) -> None:
    """A block whose source did not change is drawn again when a reference turns up."""
    say(page, "see [this][1]\\n\\nmore\\n\\n[1]: https://example.org/x")
    assert page.locator(".md a").get_attribute("href") == "https://example.org/x"
    assert answer(page) == "see this\n\nmore"


EVIL = [
    "<script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "[x](javascript:window.hit=1)",
    "![x](javascript:window.hit=1)",
    "[x](data:text/html,<script>window.hit=1</script>)",
    "[x][1]\\n\\n[1]: javascript:window.hit=1",
    "<javascript:window.hit=1>",
    "```html\\n<script>window.hit=1</script>\\n```",
    "```html\\n<img src=x onerror=window.hit=1>\\n```",
    "```<img/src=x/onerror=window.hit=1>\\nx\\n```",
    '"><svg onload=window.hit=1>',
    "| <b onclick=window.hit=1>a</b> |\\n|---|\\n| <script>window.hit=1</script> |",
    "`<script>window.hit=1</script>`",
    r"$\href{javascript:window.hit=1}{x}$",
    r"$\htmlData{a=<script>window.hit=1</script>}{x}$ $\includegraphics{x.png}$",
    r"$\text{<img src=x onerror=window.hit=1>}$",
    "$<script>window.hit=1</script>$",
]


@pytest.mark.parametrize("evil", EVIL)
def test_what_a_model_writes_is_text(page: Any, evil: str) -> None:
    text = f"SAY {evil}</think>{evil}"
    send(page, text)
    finished(page)
    page.locator("details.reasoning summary").click()
    for link in page.locator(".md a").all():
        assert (link.get_attribute("href") or "").startswith(("http", "mailto:"))
    assert page.locator("#log script, #log img, #log b, #log [onerror], #log [onload]").count() == 0
    assert page.evaluate("window.hit") is None
    assert page.locator(".message.user .text").inner_text() == text


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
    until(page, "document.activeElement.matches('.result input')")
    send(page, "not yet")  # a result must come first
    assert page.locator(".message.user").count() == 1
    assert page.input_value("#input") == "not yet"
    page.fill(".result input", "sunny")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant >> nth=1")
    finished(page)
    assert "Result given" in page.locator("details.call summary").nth(1).inner_text()


def test_refusals_are_shown(page: Any) -> None:
    send(page, "x\nREFUSE not today")
    page.wait_for_selector(".failed")
    assert "not today" in page.locator(".failed").inner_text()
    assert page.locator(".message.assistant button:text-is('Retry')").is_visible()


def test_a_lost_connection_is_told_and_can_be_retried(page: Any) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    page.route("**/stats", lambda route: route.abort("connectionrefused"))
    send(page, "SAY </think>here again")
    page.wait_for_selector(".failed")
    assert "cannot be reached. Your message is kept" in page.locator(".failed").inner_text()
    page.wait_for_selector("#state:text-is('server not reached, trying again')")
    page.unroute_all()
    page.click("text=Retry")
    finished(page)
    assert answer(page) == "here again"
    assert page.locator(".versions").count() == 0  # the empty failure is no version
    page.wait_for_selector("#state:text-is('')", state="attached")


def test_a_server_that_dies_in_the_middle(browser: Any) -> None:
    running = Server().wait()
    try:
        with visit(browser, running.url) as page:
            send(page, "SAY </think>" + "word " * 400 + "\nMS 20")
            until(page, "document.querySelector('.md')?.innerText.length > 40")
            running.process.kill()
            page.wait_for_selector(".failed")
            assert "What had come is kept" in page.locator(".failed").inner_text()
            assert answer(page).startswith("word word word")
    finally:
        running.process.wait()
        running.file.close()


def test_figures_move(page: Any) -> None:
    send(page, "SAY </think>" + "word " * 100 + "\nMS 10")
    until(page, "document.querySelector('.figure b').textContent > '0'")
    finished(page)
    assert page.locator(".bar").count() == 3
    assert page.locator(".figure .line").first.get_attribute("d").startswith("M")


def test_keyboard_alone(page: Any) -> None:
    seen = set()
    for _ in range(16):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"new", "search", "log", "input", "attach", "mode", "send", "options"} <= seen
    assert "SUMMARY" in seen


def test_thinking_says_its_state_in_words(page: Any) -> None:
    assert page.inner_text("#mode") == "Thinking: on"
    page.click("#mode")
    assert page.inner_text("#mode") == "Thinking: off"
    assert page.get_attribute("#mode", "aria-pressed") == "false"


WATCH_LABELS = """() => {
  window.labels = [];
  const note = (changes) => changes.forEach(({ target }) => labels.push(target.textContent));
  new MutationObserver(note).observe(document.body, { subtree: true, childList: true });
}"""


def test_copying_without_https(page: Any, browser: Any, server: Server) -> None:
    """Plain HTTP from another machine has no navigator.clipboard."""
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.reload()
    say(page, "take me along")
    page.evaluate(WATCH_LABELS)  # the label changes back after a second, soon on a busy machine
    page.locator(".message.assistant button:text-is('Copy')").click()
    page.wait_for_function("window.labels.includes('Copied')")
    page.focus("#search")
    page.keyboard.press("Control+v")
    assert page.input_value("#search") == "take me along"


def test_examples_fit_the_model(page: Any) -> None:
    page.wait_for_selector(".examples button:text-is('What is the capital of France?')")
    page.set_viewport_size(WIDE)
    page.locator(".examples button").first.click()
    finished(page)
    assert page.locator(".message.user .text").inner_text() == "What is the capital of France?"


def test_the_menu_closes(page: Any) -> None:
    page.click("#more > summary")
    assert page.locator("#rename").is_disabled()
    page.click("#log")
    assert not page.locator("#rename").is_visible()
    menu(page, "delete-all")  # nothing to delete: nothing happens
    assert page.inner_text("#toast") == ""
