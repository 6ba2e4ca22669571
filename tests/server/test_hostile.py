"""Requests made to hold a server up: each is refused early, and others are answered meanwhile.

Nothing here looks at a clock: the message of a refusal shows how far the request came. How late
the event loop was is measured by `make attack`.
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import from_json

from dsv4.chat import V4_OFFICIAL, Tokenizer
from dsv4.chat.requests import read_chat_completions
from dsv4.server.api_error import ApiError
from dsv4.server.generation import plan_chat
from dsv4.server.json_route import read_in_pieces
from dsv4.server.options import MAX_LOGPROBS, SMALL_BYTES, ServerOptions
from dsv4.server.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, MessagesBody
from dsv4.server.service import Service
from dsv4.server.worker.link import EngineLink
from dsv4.util.models import model_folder
from tests.server.support import ASK, Server

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
ESCAPE = b'{"messages": [{"role": "user", "content": "' + b"\\u00e9" * 4_000_000 + b'"}]}'


def fields(**more: Any) -> bytes:
    return json.dumps({"messages": ASK, "max_tokens": 5, **more}).encode()


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (CHAT, b'{"messages": [' + b"1," * 4_500_000 + b"1]}", "numbers"),
        (CHAT, b'{"messages": [' + b'"",' * 3_000_000 + b'""]}', "values"),
        (CHAT, b'{"messages": [' + b"1," * 60_000 + b"1]}", "60001 entries"),
        (CHAT, b'{"messages": [' + b"1," * 15_000 + b"1]}", "messages[0]"),
        (
            CHAT,
            fields(logit_bias={f"k{n}": 1 for n in range(60_000)}),
            "logit_bias: found 60000 entries",
        ),
        (CHAT, fields(tools=[{}] * 100_000), "tools: found 100000 entries"),
        (
            CHAT,
            fields(metadata={f"k{n}": 1 for n in range(60_000)}),
            "metadata: found 60000 entries",
        ),
        (CHAT, fields(**{f"k{n}": 1 for n in range(60_000)}), "body: found 60002 entries"),
        (CHAT, fields(structured_outputs={"choice": [1] * 100_000}), "choice"),
        ("/v1/completions", b'{"prompt": [' + b"{}," * 100_000 + b"{}]}", "prompt"),
        ("/v1/completions", b'{"prompt": [' + b"1," * 1_000_000 + b'"x"]}', "prompt"),
        ("/v1/messages", b'{"max_tokens":1,"messages": [' + b"[]," * 100_000 + b"1]}", "messages"),
        (
            "/v1/responses",
            b'{"input": [' + b"1," * 1_000_000 + b"1]}",
            "input: found 1000001 entries",
        ),
        ("/detokenize", b'{"tokens": [' + b"-1," * 1_000_000 + b"1]}", "tokens"),
        (CHAT, ESCAPE, "tokens"),
        (CHAT, b'{"messages":' + b"[" * 200_000, "not JSON"),
    ],
    ids=lambda value: f"{value[:24]!r} {len(value)}" if isinstance(value, bytes) else None,
)
def test_large_nonsense_is_cheap_to_refuse(
    server: Server, path: str, body: bytes, word: str
) -> None:
    with server.client() as client:
        answer = client.post(path, content=body, headers=JSON)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]
    assert len(answer.content) < 1000


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (ChatBody, {"messages": [1] * 20_000}),
        (ChatBody, {"messages": [], "tools": [1] * 2_000}),
        (ChatBody, {"messages": [], "structured_outputs": {"choice": [1] * 4_096}}),
        (CompletionBody, {"prompt": ["x"] * 1000 + [1]}),
        (CompletionBody, {"prompt": [1] * 1000 + ["x"] * 1000}),
        (MessagesBody, {"max_tokens": 1, "messages": [[]] * 20_000, "system": [1] * 20_000}),
        (DetokenizeBody, {"tokens": ["x"] * 100_000}),
    ],
)
def test_validation_stops_at_the_first_error(body: type[Body], fields: Any) -> None:
    """One for each branch of a union and each field at most, not one for each entry."""
    with pytest.raises(ValidationError) as found:
        body(**fields)
    assert found.value.error_count() <= 4


@pytest.mark.parametrize(
    "path", ["/tokenize", "/v1/completions", CHAT, "/v1/messages/count_tokens"]
)
def test_a_text_that_cannot_fit_is_refused_by_its_length(server: Server, path: str) -> None:
    """The scripted engine has a context of 4,096 tokens, and no token stands for 100 bytes."""
    text = "word " * 800_000
    body = {"prompt": text} if path in ("/tokenize", "/v1/completions") else {
        "messages": [{"role": "user", "content": text}]
    }  # fmt: skip
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert "characters" in answer.json()["error"]["message"]


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = Tokenizer.from_folder(model_folder("tiny"))
    text = "1234567 " * 40_000
    turns = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal turns
        while not ended.is_set():
            time.sleep(0)
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = turns
    ids = [tokenizer.encode(text), tokenizer.encode_with_specials(text)]
    during = turns - before
    ended.set()
    thread.join()
    assert during > 1000  # with the interpreter's lock held, next to none
    assert [tokenizer.decode(found) for found in ids] == [text, text]


def test_an_engine_that_is_busy_says_when_to_come_again(server: Server) -> None:
    answer = server.chat("BUSY 64 guides wait")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_busy"
    assert int(answer.headers["retry-after"]) > 0


# --- JSON in pieces ---------------------------------------------------------------------------


def values(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(9)
    if kind == 0 and depth < 4:
        return {text(draw): values(draw, depth + 1) for _ in range(draw.randrange(5))}
    if kind == 1 and depth < 4:
        return [values(draw, depth + 1) for _ in range(draw.randrange(6))]
    if kind == 2:
        return draw.choice([True, False, None])
    if kind == 3:
        return draw.uniform(-1e10, 1e10)
    if kind == 4:
        return [draw.randrange(10**6) for _ in range(draw.randrange(40))]
    return draw.randrange(-(10**20), 10**20) if kind == 5 else text(draw)


def text(draw: random.Random) -> str:
    length = draw.randrange(8000) if draw.random() < 0.02 else draw.randrange(12)
    return "".join(draw.choices('ab"\\\n\té日😀{}[],: ', k=length))


def outcome(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except ValueError:
        return "not JSON"


def test_pieces_are_read_as_a_whole_would_be() -> None:
    """Against the parser that small bodies go through: good texts, and damaged ones."""
    draw = random.Random(7)
    for _ in range(800):
        value = values(draw)
        good = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1]))
        data = bytearray(good.encode())
        assert read_in_pieces(bytes(data)) == value
        data[draw.randrange(len(data))] = draw.choice(b'"\\{}[],:1eu\xff\x80 a')
        expected = outcome(lambda part: from_json(part, allow_inf_nan=False), bytes(data))
        assert outcome(read_in_pieces, bytes(data)) == expected


@pytest.mark.parametrize("character", ["é", "\U0001f600", "\\u00e9", "\\ud83d\\ude00", '\\"', "a"])
@pytest.mark.parametrize("shift", range(4))
def test_long_strings_are_cut_between_characters(character: str, shift: int) -> None:
    data = f'["{"x" * shift}{character * 300_000}"]'.encode()
    assert read_in_pieces(data) == json.loads(data)


@pytest.mark.parametrize(
    "text", [b"\\ud83d", b"\\ud83d\\u0041", b"\\u12", b"\x01", b"\xff", b"\xc3", b"\\"]
)
def test_half_characters_and_open_strings(text: bytes) -> None:
    for data in (b'["' + text + b'"]', b'["' + text):
        with pytest.raises(ValueError, match=r".+"):
            read_in_pieces(data)


def test_counts_end_the_reading() -> None:
    with pytest.raises(ApiError, match="numbers"):
        read_in_pieces(b"[" + b"1," * 1_400_000 + b"1]")
    with pytest.raises(ApiError, match="values"):
        read_in_pieces(b"[" + b"{}," * 300_000 + b"1]")
    with pytest.raises(ApiError, match="values"):
        read_in_pieces(b'{"a":[' + b'{"b":[[1]],"c":""},' * 50_000 + b"1]}")
    with pytest.raises(ApiError, match="values"):  # one key, again and again
        read_in_pieces(b"{" + b'"a": 1,' * 300_000 + b'"a": 1}')


@pytest.mark.parametrize("last", [b'"x": [1, 2]', b'"x": {"y": []}', b'"x": ""', b'"x": tru', b""])
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_long_runs_of_members_and_entries(count: int, last: bytes) -> None:
    """They are read many at once; what comes behind them is not."""
    members = b"".join(b'"k%d" : "a,\\"b:",' % number for number in range(count)) + last
    entries = b'{"a": "}", "b": 1.5e3}, [ ], -1 , "]",' * count
    for data in (b"{" + members + b"}", b"[" + entries + b"{" + last + b"}]"):
        expected = outcome(lambda part: from_json(part, allow_inf_nan=False), data)
        assert outcome(read_in_pieces, data) == expected


@pytest.mark.parametrize("padding", [0, SMALL_BYTES])
@pytest.mark.parametrize(("opening", "closing"), [(b'{"a":', b"}"), (b"[", b"]")])
def test_nesting_has_a_limit(server: Server, padding: int, opening: bytes, closing: bytes) -> None:
    """The same for bodies that are read in one go and in pieces."""
    head = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "metadata": {"a":'
    with server.client() as client:
        for count, status in ((126, 200), (127, 400), (150, 400)):  # inside two levels
            body = head + opening * count + b"1" + closing * count + b"}}" + b" " * padding
            answer = client.post(CHAT, content=body, headers=JSON)
            assert answer.status_code == status, answer.text
            assert status == 200 or "nested deeper than 128" in answer.text


# --- log-probabilities ------------------------------------------------------------------------


def test_log_probabilities_are_counted_before_the_answer_begins(server: Server) -> None:
    wide: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "n": 16}
    answer = server.chat("SAY x", **wide, max_tokens=2000)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "too_many_logprobs"
    assert "500000" in answer.json()["error"]["message"]
    assert server.chat("SAY </think>x", **wide, max_tokens=5).status_code == 200
    body = {"prompt": [1] * 3000, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 0}
    assert server.post("/v1/completions", body).status_code == 400
    body = {"prompt": "x", "logprobs": 20, "n": 16, "max_tokens": 2000}
    assert server.post("/v1/completions", body).status_code == 400


def test_without_a_limit_of_its_own_an_answer_is_as_long_as_fits() -> None:
    """The default for reasoning, 65,536 tokens with 20 alternatives, would be too much."""
    service = Service("tiny", ServerOptions(), fake_link(max_context=100_000))
    conversation = read_chat_completions({"messages": ASK}, V4_OFFICIAL)
    body = ChatBody(messages=ASK)
    order = plan_chat(service, conversation, body, asked=None, logprobs=20, is_whole=True)
    assert order.num_logprobs <= MAX_LOGPROBS
    assert order.params.max_tokens == MAX_LOGPROBS // 21
    streamed = plan_chat(service, conversation, body, asked=None, logprobs=20)
    assert streamed.params.max_tokens == 65536


def test_all_requests_share_a_limit() -> None:
    service = Service("tiny", ServerOptions(), fake_link())
    with contextlib.ExitStack() as held:
        for _ in range(4):
            held.enter_context(service.hold_logprobs(MAX_LOGPROBS))
        with pytest.raises(ApiError) as refused, service.hold_logprobs(1):
            pass
        assert refused.value.status_code == 503
        assert refused.value.headers is not None
        assert "retry-after" in refused.value.headers
    with service.hold_logprobs(MAX_LOGPROBS):
        pass


def fake_link(**facts: Any) -> EngineLink:
    link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
    link.facts = {"dialect": V4_OFFICIAL.name, "max_context": 4096, "vocab_size": 4096, **facts}
    return link
