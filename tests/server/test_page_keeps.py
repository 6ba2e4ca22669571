"""The page in a real browser: nothing that was written is lost, and it can be taken along."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.browsing import answer, download, finished, menu, say, send, stored, until
from tests.server.support import Server

pytestmark = pytest.mark.browser
SLOW = "SAY </think>" + "word " * 300 + "\nMS 20"


def has_words(page: Any, count: int = 5) -> None:
    last = "[...document.querySelectorAll('.md')].at(-1)"
    until(page, f"{last}?.innerText.split(' ').length > {count}")


def version(page: Any, role: str) -> str:
    return str(page.inner_text(f".message.{role} .versions > span"))


def entries(page: Any) -> list[str]:
    return list(page.locator("#list .open").all_inner_texts())


def test_a_reload_keeps_everything(page: Any) -> None:
    say(page, "**kept**")
    page.click("#mode")
    page.fill("#input", "half a thought")
    page.reload()
    assert page.locator(".md strong").inner_text() == "kept"
    assert len(entries(page)) == 1
    assert page.inner_text("#mode") == "Thinking: off"
    assert page.input_value("#input") == "half a thought"
    page.keyboard.press("Alt+n")
    assert page.locator(".empty").is_visible()
    assert page.input_value("#input") == ""
    page.fill("#input", "another")
    page.locator("#list .open").first.click()
    assert page.locator(".md strong").inner_text() == "kept"
    assert page.input_value("#input") == "half a thought"
    page.click("#new")
    assert page.input_value("#input") == "another"


def test_an_edit_is_a_copy(page: Any) -> None:
    say(page, "first")
    page.focus("#input")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#input") == "SAY </think>first"
    page.fill("#input", "SAY </think>changed my mind")
    page.keyboard.press("Escape")
    assert page.input_value("#input") == ""
    assert answer(page) == "first"
    page.reload()
    assert answer(page) == "first"
    page.fill("#input", "a draft")
    page.click(".message.user button:text-is('Edit')")
    say(page, "second")
    assert answer(page) == "second"
    assert page.input_value("#input") == "a draft"
    assert page.locator(".message").count() == 2
    assert version(page, "user") == "2/2"
    page.click("[aria-label='Version before']")
    assert answer(page) == "first"
    page.reload()
    assert answer(page) == "first"


def test_regenerating_keeps_versions(page: Any) -> None:
    say(page, "one")
    page.click("text=Regenerate")
    page.wait_for_selector(".message.assistant .versions")
    finished(page)
    assert page.locator(".message").count() == 2
    assert version(page, "assistant") == "2/2"
    assert len(stored(page)[0]["nodes"]) == 3
    say(page, "two")
    assert page.locator(".message").count() == 4
    page.locator("[aria-label='Version before']").first.click()
    assert page.locator(".message").count() == 2
    page.locator("[aria-label='Version after']").first.click()
    assert page.locator(".message").count() == 4


def test_deleting_can_be_undone(page: Any) -> None:
    say(page, "one")
    page.locator("#list .remove").click()
    assert entries(page) == []
    assert stored(page) == []
    page.click("#toast button:text-is('Undo')")
    assert answer(page) == "one"
    page.click("#new")
    say(page, "two")
    menu(page, "delete-all")
    assert entries(page) == []
    assert "Deleted 2 conversations" in page.inner_text("#toast")
    page.click("#toast button:text-is('Undo')")
    page.reload()
    assert len(entries(page)) == 2


def test_an_answer_goes_on_while_another_chat_is_shown(page: Any) -> None:
    send(page, SLOW)
    has_words(page)
    page.click("#new")
    assert page.locator("#list .busy").inner_text() == "writing"
    say(page, "at the same time")
    assert answer(page) == "at the same time"
    page.locator("#list .open", has_text="word word").click()
    assert page.inner_text("#send") == "Stop"
    finished(page)
    assert answer(page) == ("word " * 300).strip()


def test_an_answer_is_kept_when_the_page_is_left(page: Any) -> None:
    send(page, SLOW)
    has_words(page, 20)
    page.reload()
    assert answer(page).startswith("word word word")
    assert "interrupted; kept as far as it came" in page.locator(".actions .note").last.inner_text()
    assert page.inner_text("#send") == "Send"
    page.click("text=Regenerate")
    page.wait_for_selector(".versions")
    page.keyboard.press("Escape")
    finished(page)


def test_a_page_that_crashed_leaves_an_answer_to_regenerate(page: Any) -> None:
    send(page, SLOW)
    until(page, "Object.values(localStorage).some((text) => text.includes('word word word word'))")
    kept = page.evaluate("JSON.stringify(localStorage)")
    page.keyboard.press("Escape")
    finished(page)
    old = json.loads(kept)
    for name, text in old.items():
        if name.startswith("dsv4.chat."):
            chat = json.loads(text)
            for node in chat["nodes"].values():
                node["changed"] -= 60_000  # as if a minute had passed since the crash
            old[name] = json.dumps(chat)
    page.evaluate("(old) => Object.assign(localStorage, old)", old)
    page.reload()
    page.locator("#list .open").click()
    assert "interrupted" in page.locator(".actions .note").last.inner_text()
    assert page.locator("text=Regenerate").is_visible()


def test_continuing_a_stopped_answer(page: Any, engine_log: Path) -> None:
    send(page, SLOW)
    has_words(page, 20)
    page.keyboard.press("Escape")
    finished(page)
    before = answer(page)
    page.click("text=Continue")
    page.wait_for_selector("#send:text-is('Stop')")
    until(page, f"document.querySelector('.md').innerText.length > {len(before) + 20}")
    page.keyboard.press("Escape")
    finished(page)
    assert answer(page).startswith(before)
    assert page.locator(".message").count() == 2


def test_two_tabs_agree(page: Any, server: Server) -> None:
    say(page, "one")
    other = page.context.new_page()
    other.goto(server.url)
    other.locator("#list .open").click()
    assert answer(other) == "one"
    other.click("#new")
    say(other, "two")
    until(page, "document.querySelectorAll('#list .entry').length === 2")
    say(page, "three")  # in the first conversation, which the second tab knows too
    until(page, "document.querySelectorAll('.message').length === 4")
    titles = {chat["title"]: len(chat["nodes"]) for chat in stored(other)}
    assert titles == {"SAY </think>one": 4, "SAY </think>two": 2}
    other.locator("#list .open", has_text="one").click()
    assert answer(other) == "three"
    send(page, SLOW)
    has_words(page)
    other.wait_for_selector("#send:text-is('Stop')")
    until(other, "[...document.querySelectorAll('.md')].at(-1).innerText.includes('d w')")
    page.keyboard.press("Escape")
    finished(page)
    finished(other)
    assert answer(other) == answer(page)
    other.locator("#list .remove").first.click()
    until(page, "document.querySelectorAll('#list .entry').length === 1")
    assert page.locator(".empty").is_visible()


def test_both_tabs_write_into_one_conversation(page: Any, server: Server) -> None:
    """A tab that saves without having heard of the other's message loses neither."""
    say(page, "one")
    [chat] = stored(page)
    last = next(node for node in chat["nodes"].values() if node["role"] == "assistant")
    late = {**last, "id": "late", "parent": last["id"], "role": "user", "content": "from afar"}
    chat["nodes"]["late"] = late
    page.evaluate(
        "(chat) => localStorage.setItem('dsv4.chat.' + chat.id, JSON.stringify(chat))", chat
    )
    say(page, "two")  # no storage event comes to the tab that wrote
    contents = {node["content"] for node in stored(page)[0]["nodes"].values()}
    assert {"from afar", "two", "one"} <= contents


def test_a_list_of_an_earlier_page_is_taken_over(page: Any) -> None:
    old = [{"id": "1", "title": "old", "messages": [{"role": "user", "content": "hi"},
           {"role": "assistant", "content": "**there**"}]}]  # fmt: skip
    page.evaluate("(old) => localStorage.setItem('dsv4.chats', JSON.stringify(old))", old)
    page.reload()
    page.locator("#list .open:text-is('old')").click()
    assert page.locator(".md strong").inner_text() == "there"


def test_a_full_browser_is_told(page: Any) -> None:
    page.evaluate(
        """() => {
          for (const size of [1 << 20, 1 << 14, 1 << 8, 1]) {
            try {
              for (let at = 0; ; at += 1) localStorage.setItem(`x${size}-${at}`, "x".repeat(size));
            } catch {}
          }
        }"""
    )
    send(page, "SAY </think>still answered")
    finished(page)
    assert answer(page) == "still answered"
    assert "no room left" in page.inner_text("#toast")


def test_rename_and_search(page: Any) -> None:
    say(page, "the zebra runs")
    menu(page, "rename")
    page.fill("#title-field", "Animals")
    page.keyboard.press("Enter")
    assert page.inner_text("#title") == "Animals"
    page.dblclick("#title")
    page.fill("#title-field", "never")
    page.keyboard.press("Escape")
    page.reload()
    assert entries(page) == ["Animals"]
    page.click("#new")
    say(page, "cars")
    page.fill("#search", "ZEBRA")
    assert entries(page) == ["Animals"]
    page.fill("#search", "nothing like it")
    assert "Nothing found" in page.inner_text("#list")


def test_export_and_import(page: Any, browser: Any, server: Server, tmp_path: Path) -> None:
    say(page, "**one**")
    page.click("text=Regenerate")
    page.wait_for_selector(".versions")
    finished(page)
    name, text = download(page, "export-markdown")
    assert name == "SAY-think-one.md"
    assert "# SAY </think>**one**\n\n## You\n\n" in text
    assert text.endswith("## Answer\n\n**one**\n")
    name, text = download(page, "export-json")
    assert name == "SAY-think-one.json"
    page.click("#new")
    say(page, "two")
    _, everything = download(page, "export-all")
    assert len(json.loads(everything)["chats"]) == 2
    before = sorted(stored(page), key=lambda chat: chat["id"])
    menu(page, "delete-all")
    file = tmp_path / "all.json"
    file.write_text(everything)
    page.set_input_files("#import-file", file)
    until(page, "document.querySelectorAll('#list .entry').length === 2")
    assert sorted(stored(page), key=lambda chat: chat["id"]) == before
    page.set_input_files("#import-file", file)  # twice changes nothing
    page.wait_for_selector("#toast:has-text('2 conversations imported')")
    assert len(entries(page)) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "the file holds no JSON"),
        ("{}", "neither conversations of dsv4 nor a list of messages"),
        ("null", "neither conversations of dsv4 nor a list of messages"),
        (
            '{"chats": [{"id": "x", "title": "t", "chosen": {}, "nodes": {"a": 1}}]}',
            "no conversation",
        ),
    ],
)
def test_files_that_are_none(page: Any, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    page.set_input_files("#import-file", file)
    page.wait_for_selector(f"#toast:has-text('{says}')")
    assert entries(page) == []


def test_messages_of_other_programs_are_imported(page: Any, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"messages": messages}))
    page.set_input_files("#import-file", file)
    page.wait_for_selector(".message.user .text:text-is('hello')")
    page.click("#options")
    assert page.input_value("[name=system]") == "Be kind."


def requests(log: Path) -> list[Any]:
    messages = [json.loads(line) for line in log.read_text().splitlines()]
    return [message["request"] for message in messages if message["kind"] not in ("abort", "score")]


def test_settings_belong_to_a_conversation(page: Any, engine_log: Path) -> None:
    say(page, "one")
    values = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.01, "seed": 11, "max_tokens": 99,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1,
    }  # fmt: skip
    page.click("#options")
    assert page.inner_text("#settings-scope") == "For this conversation."
    for name, value in values.items():
        page.fill(f"[name={name}]", str(value))
    page.fill("[name=system]", "Speak like a pirate.")
    page.click("button[value=save]")
    say(page, "two")
    params = requests(engine_log)[-1]["params"]
    for name, value in values.items():
        assert params[name] == value, name
    page.click("#new")
    say(page, "three")
    assert requests(engine_log)[-1]["params"]["top_k"] != 7
    page.locator("#list .open", has_text="one").click()
    page.reload()
    page.click("#options")
    assert page.input_value("[name=system]") == "Speak like a pirate."
    page.check("[name=everywhere]")
    page.click("button[value=save]")
    page.click("#new")
    page.click("#options")
    assert page.inner_text("#settings-scope") == "For new conversations."
    assert page.input_value("[name=top_k]") == "7"


def test_text_files_are_attached(page: Any, tmp_path: Path, server: Server) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("three ``` ticks\nand more\n")
    page.set_input_files("#attach-file", notes)
    page.wait_for_selector(".chip")
    page.reload()
    assert page.inner_text(".chip").startswith("notes.txt")
    sent: list[Any] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.post_data else None)
    say(page, "read")
    assert sent[-1]["messages"][-1]["content"] == (
        "File notes.txt:\n````\nthree ``` ticks\nand more\n````\n\nSAY </think>read"
    )
    assert page.locator(".chip").count() == 0
    assert page.inner_text("details.file summary") == "notes.txt (25 characters)"
    binary = tmp_path / "picture.png"
    binary.write_bytes(b"\x89PNG\0\xff")
    page.set_input_files("#attach-file", binary)
    page.wait_for_selector("#toast:has-text('it is no text in UTF-8')")
    big = tmp_path / "big.txt"
    big.write_text("x" * 500_001)
    page.set_input_files("#attach-file", big)
    page.wait_for_selector("#toast:has-text('expected at most 500000')")
    assert page.locator(".chip").count() == 0
