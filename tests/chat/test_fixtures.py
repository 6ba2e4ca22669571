"""Every case of the fixture files, byte for byte."""

import json
import random
from typing import Any

import pytest

from dsv4.chat import V41, Dialect, OutputParser, Prompt, encode_prompt, texts
from dsv4.chat.dialect import V4_OFFICIAL, V4_PREVIEW
from dsv4.chat.prompt import Segment, Start
from dsv4.chat.requests import read_chat_completions, read_messages_api, read_responses
from tests.chat.fuzz import cut_at_random
from tests.chat.support import (
    FIXTURES,
    as_fixture,
    cases,
    dialect_of,
    tokenizer_of,
    tools_of_fixtures,
    v4_tokenizer,
)


def by_id(name: str) -> Any:
    return pytest.mark.parametrize("case", cases(name), ids=lambda case: case["id"])


def encode(case: dict[str, Any], messages: list[dict[str, Any]]) -> Prompt:
    return encode_prompt(
        messages,
        dialect=dialect_of(case),
        mode="thinking" if case["thinking"] else "chat",
        effort=case.get("reasoning_effort"),
        drop_thinking=case.get("drop_thinking", True),
        add_bos=case.get("add_bos", True),
        at_server=False,
    )


@by_id("encode.jsonl")
def test_encode(case: dict[str, Any]) -> None:
    assert encode(case, case["messages"]).text == case["expected"]


@pytest.mark.parametrize(
    "case",
    json.loads((FIXTURES / "golden/index.json").read_text(encoding="utf-8")),
    ids=lambda case: case["id"],
)
def test_golden(case: dict[str, Any]) -> None:
    found = json.loads((FIXTURES / case["input"]).read_text(encoding="utf-8"))
    messages = found
    if isinstance(found, dict):
        messages = found["messages"]
        if "tools" in found:
            messages[0]["tools"] = found["tools"]
    expected = (FIXTURES / case["expected"]).read_bytes().decode("utf-8")
    assert encode(case, messages).text == expected


READERS = {
    "requests.jsonl": read_chat_completions,
    "requests_messages.jsonl": read_messages_api,
    "requests_responses.jsonl": read_responses,
}


@pytest.mark.parametrize("name", READERS)
def test_requests(name: str) -> None:
    for case in cases(name):
        dialect = dialect_of(case)
        prompt = READERS[name](case["body"], dialect).encode(dialect)
        assert prompt.text == case["expected_prompt"], case["id"]


def parser_of(case: dict[str, Any], **options: Any) -> OutputParser:
    start = "reasoning" if case["thinking"] else "answer"
    if case.get("prompt_opened_block"):
        start = "block"
    if "continues" in case:
        start = "reasoning" if case["continues"] == "reasoning" else "answer"
    known = tools_of_fixtures()
    return OutputParser(
        dialect_of(case),
        start=start,  # type: ignore[arg-type]
        continued="continues" in case,
        tools={name: known[name] for name in case.get("tools", [])},
        tools_active=case["tools_active"],
        stop=case.get("stop", ()),
        **options,
    )


def parse_text_pieces(case: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
    parser = parser_of(case)
    for piece in pieces:
        parser.push_text(piece)
    parser.finish(case["finish"])
    return as_fixture(parser.result)


@by_id("parse.jsonl")
def test_parse(case: dict[str, Any]) -> None:
    text = case["text"]
    assert parse_text_pieces(case, [text]) == case["expected"]
    assert parse_text_pieces(case, list(text)) == case["expected"]
    for at in range(len(text)):
        assert parse_text_pieces(case, [text[:at], text[at:]]) == case["expected"], at
    rng = random.Random(case["id"])
    for _ in range(20):
        assert parse_text_pieces(case, cut_at_random(text, rng)) == case["expected"]


@by_id("parse_tokens.jsonl")
def test_parse_tokens(case: dict[str, Any]) -> None:
    ids = case["token_ids"]
    for pieces in ([ids], [[token_id] for token_id in ids], [ids[:3], ids[3:]]):
        parser = parser_of(case, tokenizer=v4_tokenizer())
        for piece in pieces:
            parser.push_tokens(piece)
        parser.finish(case["finish"])
        assert as_fixture(parser.result) == case["expected"]


def test_tokenize() -> None:
    for case in cases("tokenize.jsonl"):
        ids = v4_tokenizer().encode(case["text"])
        assert ids == case["ids"], case["text"]
        assert v4_tokenizer().decode(ids) == case["text"]


@by_id("prompt_ids.jsonl")
def test_prompt_ids(case: dict[str, Any]) -> None:
    segments = [
        Segment(piece["special"], True) if "special" in piece else Segment(piece["plain"], False)
        for piece in case["segments"]
    ]
    dialect = dialect_of(case)
    prompt = Prompt(tuple(segments), Start("answer"), (), dialect)
    assert prompt.ids(tokenizer_of(dialect)) == case["ids"]


def test_prompt_texts() -> None:
    fixed = json.loads((FIXTURES / "prompt_texts.json").read_text(encoding="utf-8"))
    assert fixed["tools_block"] == texts.TOOLS_BLOCK
    assert fixed["response_format"] == texts.RESPONSE_FORMAT
    assert fixed["json_object_v4"] == texts.JSON_OBJECT_V4
    assert fixed["added_tools_v4.1"] == texts.ADDED_TOOLS_V41
    assert fixed["system_role_in_messages_v4"] == texts.SYSTEM_REMINDER
    assert fixed["unsupported_image_v4"] == texts.UNSUPPORTED_IMAGE
    assert fixed["unsupported_part"] == texts.UNSUPPORTED_PART
    assert fixed["tool_result"] == texts.TOOL_RESULT_OPEN + "{content}" + texts.TOOL_RESULT_CLOSE
    assert fixed["effort"]["v4.1_template"] == texts.EFFORT_V41
    for name, text in fixed["effort"]["v4_preview"].items():
        assert V4_PREVIEW.effort_text(name) == text
    for name, text in fixed["effort"]["v4_official"].items():
        assert V4_OFFICIAL.effort_text(name) == text
    for name, number in fixed["effort"]["v4.1_names"].items():
        assert V41.effort_text(name) == V41.effort_text(number)


@pytest.mark.parametrize("dialect", [V4_PREVIEW, V4_OFFICIAL, V41], ids=lambda d: d.name)
def test_tag_names(dialect: Dialect) -> None:
    fixed = json.loads((FIXTURES / "prompt_texts.json").read_text(encoding="utf-8"))
    tags = fixed["tag_names"]["v4.1" if dialect.is_v41 else "v4"]
    found = (dialect.block_tag, dialect.invoke_tag, dialect.parameter_tag)
    assert found == (tags["block"], tags["invoke"], tags["parameter"])
