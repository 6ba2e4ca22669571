"""The files of the page: what is sent, how long it is kept, where the libraries come from."""

import hashlib
import json
import re
from typing import Any

import pytest

from tests.server.support import ROOT, Server

STATIC = ROOT / "dsv4" / "server" / "static"
VENDOR = STATIC / "vendor"


def test_libraries_are_the_ones_that_were_checked() -> None:
    """Every file by its digest, and a licence in every folder."""
    lines = (VENDOR / "DIGESTS.txt").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines[3:])}
    files = [path for path in VENDOR.rglob("*") if path.is_file() and path.name != "DIGESTS.txt"]
    found = {
        path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    assert found == listed
    for folder in VENDOR.iterdir():
        assert folder.is_file() or "Copyright" in (folder / "LICENSE").read_text(), folder


def test_every_file_that_is_named_is_sent(server: Server) -> None:
    """What the page and its modules import exists, and nothing comes from elsewhere."""
    names = {"index.html"}
    for path in STATIC.glob("*.*"):
        text = path.read_text()
        named = re.findall(r'from "\./([^"]+)"|(?:src|href)="/static/([^"]+)"', text)
        names |= {first or second for first, second in named}
        assert not re.findall(r'(?:src|href)="https?:|import\("http|url\(http', text)
    assert any("katex.min.css" in name for name in names)
    css = (VENDOR / "katex-0.19.1" / "katex.min.css").read_text()
    names |= {f"vendor/katex-0.19.1/{name}" for name in re.findall(r"url\((\S+?woff2)\)", css)}
    assert len(names) > 30
    with server.client() as client:
        for name in sorted(names):
            answer = client.get(f"/static/{name}")
            assert answer.status_code == 200, name
            assert (
                "script-src 'self'; style-src 'self'" in answer.headers["content-security-policy"]
            )
            is_pinned = name.startswith("vendor/")
            assert ("immutable" in answer.headers["cache-control"]) == is_pinned
        for name in ("vendor/DIGESTS.txt", "../app.py", "vendor", "vendor/katex-0.19.1/LICENSE"):
            assert client.get(f"/static/{name}").status_code == 404


def test_a_file_that_is_known_is_not_sent_again(server: Server) -> None:
    with server.client() as client:
        first = client.get("/static/app.js")
        again = client.get("/static/app.js", headers={"if-none-match": first.headers["etag"]})
        other = client.get("/static/app.js", headers={"if-none-match": '"another"'})
    assert (first.status_code, again.status_code, other.status_code) == (200, 304, 200)
    assert again.content == b""
    assert other.content == first.content


def examples() -> dict[str, list[str]]:
    text = (STATIC / "examples.js").read_text()
    found: dict[str, list[str]] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return found


@pytest.mark.parametrize(
    ("question", "word"),
    [*zip(examples()["tiny"], ("Paris", "932", "South America"), strict=True)],
)
def test_the_embedded_model_can_do_what_the_page_offers(
    tiny: Server, question: str, word: str
) -> None:
    """As the page asks: thinking, at the default temperature."""
    answer: Any = tiny.chat(question, reasoning_effort="high", seed=1).json()
    assert word in answer["choices"][0]["message"]["content"]
