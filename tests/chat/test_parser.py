"""The parser beyond its fixtures: splits, round trips, streaming rules, the corpus."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.chat import (
    V4_OFFICIAL,
    V41,
    Delta,
    Dialect,
    OutputParser,
    Tokenizer,
    encode_prompt,
    parse,
)
from dsv4.chat import texts as fixed
from dsv4.chat.output.stops import read_stops
from dsv4.errors import RequestError
from tests.chat.fuzz import (
    TOOLS,
    check,
    cut_at_random,
    ends_in_half_marker,
    make_case,
    marker_ids,
    parse_ids,
    parse_text,
    tiny_tokenizer,
)
from tests.chat.support import cases, v4_tokenizer, v41_tokenizer

TINY = tiny_tokenizer()
NUM_SPLITS = {"characters": 600, "tokens": 250, "bytes": 200}


def completions() -> list[dict[str, Any]]:
    """The outputs of the fixtures and of the corpus, as cases of the fuzzer."""
    found = [
        {
            "text": case["text"],
            "v41": case["dialect"] == "v4.1",
            "start": "block"
            if case.get("prompt_opened_block")
            else ("reasoning" if case["thinking"] else "answer"),
            "continued": "continues" in case,
            "tools_active": case["tools_active"],
            "finish": case["finish"],
            "stop": case.get("stop", []),
            "seed": place,
        }
        for place, case in enumerate(cases_of("fixtures/parse.jsonl"))
    ]
    return found + cases_of("corpus.jsonl")


def cases_of(name: str) -> list[dict[str, Any]]:
    return cases(f"../{name}")


@pytest.mark.parametrize("part", range(4))
def test_a_thousand_splits_of_every_completion(part: int) -> None:
    """At characters, at tokens of the real tokenizer, and at bytes (one token for each)."""
    for case in completions()[part::4]:
        rng = random.Random(case["seed"])
        whole = parse_text(case, [case["text"]])
        for _ in range(NUM_SPLITS["characters"]):
            assert parse_text(case, cut_at_random(case["text"], rng)) == whole, case["text"]
        if ends_in_half_marker(case["text"]):
            case = {**case, "text": case["text"] + "."}
            whole = parse_text(case, [case["text"]])
        for kind, tokenizer in (("tokens", real_tokenizer(case)), ("bytes", TINY)):
            ids = marker_ids(case, tokenizer)
            for _ in range(NUM_SPLITS[kind]):
                found = parse_ids(case, cut_at_random(ids, rng), tokenizer)
                assert found == whole, case["text"]


def real_tokenizer(case: dict[str, Any]) -> Tokenizer:
    return v41_tokenizer() if case["v41"] else v4_tokenizer()


@pytest.mark.parametrize("case", cases_of("corpus.jsonl"), ids=lambda case: case["why"])
def test_corpus(case: dict[str, Any]) -> None:
    check(case, TINY, num_splits=20)


def test_fuzz_briefly() -> None:
    rng = random.Random(7)
    for _ in range(400):
        check(make_case(rng), TINY)


WORDS = st.sampled_from(
    [
        "a", "Rome", "日本", "🤭", "\n", " ", '"', "\\", "<", "</", ">", "{", "}", "｜", "DSML",
        fixed.THINK_OPEN, fixed.USER, fixed.EOS, "</｜DSML｜parameter>", "<tool_result>",
    ]
)  # fmt: skip
TEXTS = st.lists(WORDS, max_size=8).map("".join)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
KEYS = TEXTS.filter(lambda key: '"' not in key)
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(TOOLS)), st.dictionaries(KEYS, JSON_VALUES, max_size=3)),
    max_size=3,
)


@settings(deadline=None, max_examples=200)
@given(
    dialect=st.sampled_from([V4_OFFICIAL, V41]),
    reasoning=TEXTS,
    content=TEXTS,
    calls=CALLS,
    thinking=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_encoded_turn_is_parsed_back(
    dialect: Dialect,
    reasoning: str,
    content: str,
    calls: list[tuple[str, dict[str, Any]]],
    thinking: bool,
    seed: int,
) -> None:
    """Encode an assistant turn, cut out its tokens, parse them: the same turn comes back.

    At the ends of the parts the format itself is ambiguous: newlines there are trimmed.
    """
    tokenizer = v41_tokenizer() if dialect.is_v41 else v4_tokenizer()
    tools = [
        {"function": {"name": name, "parameters": {"properties": {key: {} for key in keys}}}}
        for name, keys in TOOLS.items()
    ]
    user = {"role": "user", "content": "q"}
    turn = {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [
            {"id": str(at), "function": {"name": name, "arguments": json.dumps(arguments)}}
            for at, (name, arguments) in enumerate(calls)
        ],
    }
    options: dict[str, Any] = {
        "dialect": dialect,
        "tools": tools,
        "mode": "thinking" if thinking else "chat",
        "at_server": False,
    }
    before = encode_prompt([user], **options)
    after = encode_prompt([user, turn], **options).ids(tokenizer)
    start = before.ids(tokenizer)
    assert after[: len(start)] == start
    parser = before.parser(tokenizer)
    for piece in cut_at_random(after[len(start) :], random.Random(seed)):
        parser.push_tokens(piece)
    parser.finish()
    parsed = parser.result
    assert parsed.reasoning == (reasoning.strip("\n") if thinking else "")
    expected = content.lstrip("\n")
    assert parsed.content == (expected.rstrip("\n") if calls else expected)
    assert [call.name for call in parsed.tool_calls] == [name for name, _ in calls]
    for call, (name, arguments) in zip(parsed.tool_calls, calls, strict=True):
        if list(arguments) in (["arguments"], ["input"]) and name != "ns::f":
            continue  # looks like an extra wrapper, and is taken for one
        assert json.loads(call.arguments) == arguments
    assert parser.ended
    assert not parsed.malformed


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=80), st.integers())
def test_text_without_markers_is_unchanged(text: str, seed: int) -> None:
    parser = OutputParser(V41, start="answer", continued=True, tools=TOOLS)
    for piece in cut_at_random(text, random.Random(seed)):
        parser.push_text(piece)
    parser.finish()
    if not any(marker in text for marker in (fixed.DSML, "<think>", "</think>", "<｜")):
        assert parser.result.content == text


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 129_279), max_size=60), st.booleans())
def test_any_tokens_are_parsed(ids: list[int], in_block: bool) -> None:
    """Ids drawn from the whole vocabulary, with the markers that matter mixed in."""
    special = v41_tokenizer().special
    mixed = [
        token_id if token_id % 3 else (special.dsml or 0, special.think_open, 30)[token_id % 9 // 3]
        for token_id in ids
    ]
    for start in ("block", "answer") if in_block else ("reasoning",):
        results = []
        for pieces in ([mixed], [[token_id] for token_id in mixed]):
            parser = OutputParser(V41, tokenizer=v41_tokenizer(), start=start, tools=TOOLS)  # type: ignore[arg-type]
            for piece in pieces:
                parser.push_tokens(piece)
            parser.finish()
            results.append(parser.result)
        assert results[0] == results[1]


def stream(pieces: list[str], **options: Any) -> list[list[Delta]]:
    parser = OutputParser(V4_OFFICIAL, tools=TOOLS, **options)
    return [*(parser.push_text(piece) for piece in pieces), parser.finish()]


def test_only_what_may_become_a_marker_is_held() -> None:
    sent = stream(["a", "b <", "c\n", "\n", "</thi", "nk>", "d"])
    assert sent == [
        [Delta("reasoning", "a")],
        [Delta("reasoning", "b ")],
        [Delta("reasoning", "<c")],
        [],
        [],
        [],
        [Delta("content", "d")],
        [],
    ]


def test_a_name_is_sent_whole_and_strings_as_they_come() -> None:
    opening = '<｜DSML｜tool_calls><｜DSML｜invoke name="r'
    value = '<｜DSML｜parameter name="command" string="true">l'
    sent = stream([opening, 'un">', value, 's "', "</｜DSML｜parameter>", "x"], start="answer")
    assert sent == [
        [],
        [Delta("call", "run")],
        [Delta("arguments", '{"command": "l')],
        [Delta("arguments", 's \\"')],
        [Delta("arguments", '"')],
        [],
        [Delta("arguments", "}")],
    ]


def test_other_values_are_sent_when_complete() -> None:
    opening = '<｜DSML｜c><｜DSML｜invoke name="get"><｜DSML｜parameter name="a" string="false">[1'
    sent = stream([opening, ",2] ", "</｜DSML｜parameter>"], start="answer")
    assert sent[0] == [Delta("call", "get")]
    assert sent[1] == []
    assert sent[2] == [Delta("arguments", '{"a": [1,2]')]


def test_stop_string_ends_the_turn_at_once() -> None:
    parser = OutputParser(V4_OFFICIAL, start="answer", stop=["END"])
    assert parser.push_text("all E") == [Delta("content", "all ")]
    assert parser.push_text("ND more") == []
    assert parser.ended
    assert parser.push_text("ignored") == []
    parser.finish("length")
    assert parser.result.finish_reason == "stop"
    assert parser.result.stop_sequence == "END"
    assert parser.result.content == "all "


@pytest.mark.parametrize(
    ("stops", "text", "content", "found"),
    [
        (["bcd", "abc", "abcd"], "xabcd", "x", "abc"),
        (["bc", "abcde"], "xabcd", "xa", "bc"),
        (["cd", "bcd"], "abcd", "a", "bcd"),
        (["\n\n"], "\n\nHi.\n\nmore", "Hi.", "\n\n"),
        (["aab"], "aaab", "a", "aab"),
        (["zz"], "z", "z", None),
    ],
)
def test_stop_strings(stops: list[str], text: str, content: str, found: str | None) -> None:
    for pieces in ([text], list(text)):
        parser = OutputParser(V4_OFFICIAL, start="answer", tools=TOOLS, stop=stops)
        for piece in pieces:
            parser.push_text(piece)
        parser.finish()
        assert (parser.result.content, parser.result.stop_sequence) == (content, found)


@pytest.mark.parametrize("value", [3, [""], ["a"] * 65, [None], ["x" * 4097], {"a": 1}])
def test_bad_stop_strings(value: Any) -> None:
    with pytest.raises(RequestError, match="stop"):
        read_stops(value)


def test_good_stop_strings() -> None:
    assert read_stops(None) == ()
    assert read_stops("a") == ("a",)
    assert read_stops(["a", "b", "a"]) == ("a", "b")


def test_other_special_tokens_are_dropped_but_places_are_kept() -> None:
    hole, ref = v4_tokenizer().marker_id("<｜fim▁hole｜>"), v4_tokenizer().marker_id("<｜ref｜>")
    word = v4_tokenizer().encode("hi")
    parsed = parse(
        [*word, hole, *word, ref, *word], V4_OFFICIAL, tokenizer=v4_tokenizer(), start="answer"
    )
    assert parsed.content == "hihi<｜ref｜>hi"


def test_spelled_markers_are_text_in_tokens() -> None:
    text = "a</think>b<think>｜DSML｜" + fixed.EOS
    ids = v4_tokenizer().encode(text)
    parsed = parse(ids, V4_OFFICIAL, tokenizer=v4_tokenizer(), tools=TOOLS)
    assert parsed.reasoning == text


@pytest.mark.parametrize(
    "value",
    ["[" * 10_000, "1" * 10_000, "NaN", "1e999", '"\\ud800"', '{"a": 1, "a": 2}', "", "01", "'x'"],
    ids=lambda value: value[:12],
)
def test_odd_json_values_still_give_json(value: str) -> None:
    text = (
        '<｜DSML｜c><｜DSML｜invoke name="get"><｜DSML｜parameter name="a" string="false">'
        f"{value}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜c>"
    )
    arguments = parse(text, V41, start="answer", tools=TOOLS).tool_calls[0].arguments
    inner = arguments.removeprefix('{"a": ').removesuffix("}")
    is_kept = value in ("1" * 10_000, "1e999", '"\\ud800"', '{"a": 1, "a": 2}')
    assert inner == (value if is_kept else json.dumps(value))
