"""Against the publisher's own library: thousands of generated requests and outputs.

The known differences are left out by the generators, and each is shown by a test below, so that
the list of exceptions is itself checked.
"""

import json
import random
from typing import Any

import pytest

from dsv4.chat import V4_OFFICIAL, V41, Dialect, Parsed, Prompt, parse
from dsv4.chat.requests import read_chat_completions, read_messages_api, read_responses
from tests.chat.generators import NAMES, OutputMaker, RequestMaker
from tests.chat.support import (
    oracle_conversation,
    oracle_ids,
    oracle_parse,
    oracle_prompt,
    tokenizer_of,
)

READERS = {
    "chat": read_chat_completions,
    "messages": read_messages_api,
    "responses": read_responses,
}
TOOLS = {name: frozenset[str]() for name in NAMES}
NUM_REQUESTS = 500  # for each shape and dialect
NUM_OUTPUTS = 2000  # for each dialect
dialects = pytest.mark.parametrize("dialect", [V4_OFFICIAL, V41], ids=lambda d: d.name)


def special_ranges(prompt: Prompt) -> list[tuple[int, int]]:
    ranges = []
    at = 0
    for text, is_special in prompt.segments:
        if is_special:
            ranges.append((at, at + len(text)))
        at += len(text)
    return ranges


@dialects
@pytest.mark.parametrize("shape", READERS)
def test_requests(shape: str, dialect: Dialect) -> None:
    """The same text, the same places of special tokens, and for a part the same ids."""
    for seed in range(NUM_REQUESTS):
        maker = RequestMaker(random.Random(f"{shape} {dialect.name} {seed}"), dialect)
        body = getattr(maker, shape)()
        oracle = oracle_conversation(shape, body, dialect)
        text, ranges = oracle_prompt(oracle, dialect)
        prompt = READERS[shape](body, dialect).encode(dialect)
        assert prompt.text == text, f"seed {seed}: {json.dumps(body)}"
        assert special_ranges(prompt) == ranges, f"seed {seed}: {json.dumps(body)}"
        if seed % 10 == 0:
            assert prompt.ids(tokenizer_of(dialect)) == oracle_ids(oracle, dialect)


def as_oracle(parsed: Parsed) -> dict[str, Any]:
    return {
        "reasoning": parsed.reasoning,
        "content": parsed.content,
        "calls": [tuple(call) for call in parsed.tool_calls],
        "finish": parsed.finish_reason,
    }


@dialects
def test_outputs(dialect: Dialect) -> None:
    for seed in range(NUM_OUTPUTS):
        rng = random.Random(f"{dialect.name} {seed}")
        thinking, tools_active = rng.random() < 0.6, rng.random() < 0.8
        text = OutputMaker(rng, dialect, tools_active=tools_active).output(thinking=thinking)
        stop = tuple(rng.sample(["Rome", "<b>", "\n\n", "lo", "日本"], rng.choice([0, 0, 0, 1, 2])))
        finish = rng.choice(["stop", "length"])
        found = parse(
            text,
            dialect,
            start="reasoning" if thinking else "answer",
            tools=TOOLS,
            tools_active=tools_active,
            finish=finish,  # type: ignore[arg-type]
            stop=stop,
        )
        expected = oracle_parse(
            text, thinking=thinking, tools_active=tools_active, finish=finish, stop=stop
        )
        assert as_oracle(found) == expected, f"seed {seed}: {text!r}"


@dialects
def test_outputs_cut_anywhere(dialect: Dialect) -> None:
    """Where the end falls inside a call, its arguments differ by design; the rest does not."""
    for seed in range(NUM_OUTPUTS):
        rng = random.Random(f"cut {dialect.name} {seed}")
        whole = OutputMaker(rng, dialect).output(thinking=True)
        text = whole[: rng.randint(0, len(whole))]
        expected = oracle_parse(text, thinking=True, finish="length")
        found = as_oracle(parse(text, dialect, tools=TOOLS, finish="length"))
        if expected["calls"]:
            name, arguments = expected["calls"].pop()
            our_name, our_arguments = found["calls"].pop()
            assert our_name == name
            assert arguments.startswith(our_arguments), f"seed {seed}: {text!r}"
        assert found == expected, f"seed {seed}: {text!r}"


# The exceptions.


def both_prompts(body: dict[str, Any], dialect: Dialect, shape: str = "chat") -> tuple[str, str]:
    ours = READERS[shape](body, dialect).encode(dialect).text
    return ours, oracle_prompt(oracle_conversation(shape, body, dialect), dialect)[0]


def with_call(arguments: str, *ids: str) -> dict[str, Any]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for call_id in ids or ("c",)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {call['id']}"}
        for call in calls
    ]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "tool_calls": calls},
        *results,
    ]
    return {"messages": messages, "thinking": {"type": "disabled"}}


def test_exception_call_without_parameters_in_v4() -> None:
    ours, theirs = both_prompts(with_call("{}"), V4_OFFICIAL)
    assert ours != theirs
    assert ours.replace('"f">\n\n<', '"f">\n<') == theirs


def test_exception_order_by_id_in_v4() -> None:
    ours, theirs = both_prompts(with_call('{"a": 1}', "z", "b"), V4_OFFICIAL)
    assert ours.index("result z") < ours.index("result b")
    assert theirs.index("result z") > theirs.index("result b")
    ours, theirs = both_prompts(with_call('{"a": 1}', "z", "b"), V41)
    assert ours == theirs


def test_exception_small_floats_in_v4() -> None:
    ours, theirs = both_prompts(with_call('{"a": 0.00001}'), V4_OFFICIAL)
    assert ours.replace("1e-05", "0.00001") == theirs != ours


@dialects
def test_exception_long_integers(dialect: Dialect) -> None:
    number = "123456789012345678901234567890"
    ours, theirs = both_prompts(with_call(f'{{"a": {number}}}'), dialect)
    assert ours.replace(number, "1.2345678901234568e+29") == theirs != ours


def test_exception_twice_encoded_arguments_in_v41() -> None:
    ours, theirs = both_prompts(with_call(json.dumps('{"a": 1}')), V41)
    assert 'name="a" string="false">1<' in ours
    assert 'name="arguments" string="true">' in theirs


def test_exception_empty_user_text_in_v4() -> None:
    users = [{"role": "user", "content": text} for text in ("a", "", "b")]
    body = {"messages": users, "thinking": {"type": "disabled"}}
    ours, theirs = both_prompts(body, V4_OFFICIAL)
    assert ours.replace("a\n\n\n\nb", "a\n\nb") == theirs != ours
    ours, theirs = both_prompts(body, V41)
    assert ours == theirs


@dialects
def test_exception_last_assistant_turn_keeps_its_reasoning(dialect: Dialect) -> None:
    assistant = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    body = {"messages": [{"role": "user", "content": "q"}, assistant], "reasoning_effort": "low"}
    ours, theirs = both_prompts(body, dialect)
    assert ours.replace("<think>r</think>a", "</think>a") == theirs != ours


@dialects
def test_exception_any_tool_opens_the_block(dialect: Dialect) -> None:
    body = {
        "messages": [{"role": "user", "content": "q"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"},
    }
    ours, theirs = both_prompts(body, dialect, "messages")
    assert ours == f"{theirs}\n\n<｜DSML｜{dialect.block_tag}>\n"


OUTPUT_EXCEPTIONS = {
    # The library keeps one newline behind a false start of a marker.
    "a<\n\n</think>b": ({"reasoning": "a<"}, {"reasoning": "a<\n"}),
    # An opening thinking marker in the answer.
    "a</think>b<think>c</think>d": (
        {"reasoning": "ac", "content": "bd"},
        {"reasoning": "a", "content": "b<think>cd"},
    ),
    # A mention of the markup: the library drops the rest.
    "</think>Say <｜DSML｜tool_calls> first.": (
        {"content": "Say <｜DSML｜tool_calls> first."},
        {"content": "Say "},
    ),
    # Arguments are closed when the model ends its turn inside a call.
    '</think><｜DSML｜tool_calls><｜DSML｜invoke name="run">': (
        {"calls": [("run", "{}")]},
        {"calls": [("run", "")]},
    ),
}


@pytest.mark.parametrize("text", OUTPUT_EXCEPTIONS)
def test_exception_outputs(text: str) -> None:
    ours, theirs = OUTPUT_EXCEPTIONS[text]
    assert ours.items() <= as_oracle(parse(text, V4_OFFICIAL, tools=TOOLS)).items()
    assert theirs.items() <= oracle_parse(text, thinking=True).items()
