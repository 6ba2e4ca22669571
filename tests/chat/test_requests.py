"""Bodies of the three request shapes: what is refused, and where the error points."""

import random
from typing import Any

import pytest

from dsv4.chat import V4_OFFICIAL, V41
from dsv4.chat.requests import read_chat_completions, read_messages_api, read_responses
from dsv4.errors import RequestError
from tests.chat.generators import RequestMaker

USER = {"role": "user", "content": "q"}


def parts(*values: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(values)}]


BAD_BODIES: list[tuple[Any, Any, str]] = [
    (read_chat_completions, [], "body: found a list"),
    (read_chat_completions, {}, "messages: found null"),
    (read_chat_completions, {"messages": "hi"}, "messages: found a string"),
    (read_chat_completions, {"messages": [USER], "thinking": "on"}, "thinking: found a string"),
    (
        read_chat_completions,
        {"messages": [USER], "thinking": {"type": "maybe"}},
        "thinking.type: found 'maybe'",
    ),
    (
        read_chat_completions,
        {"messages": [USER], "reasoning_effort": {"a": 1}},
        "reasoning_effort: found an object",
    ),
    (
        read_chat_completions,
        {"messages": [USER], "chat_template_kwargs": {"style": "pirate"}},
        "chat_template_kwargs.style",
    ),
    (read_messages_api, {"messages": []}, "messages: found an empty list"),
    (read_messages_api, {"messages": [{"role": "tool"}]}, r"messages\[0\]\.role: found 'tool'"),
    (read_messages_api, {"messages": [{"role": "user", "content": 1}]}, r"messages\[0\]\.content"),
    (
        read_messages_api,
        {"messages": parts({"type": "text", "text": "a"}, {"type": "document"})},
        r"messages\[0\]\.content\[1\]\.type: found 'document'",
    ),
    (
        read_messages_api,
        {"messages": parts({"type": "tool_result", "tool_use_id": "x"})},
        r"messages\[0\]\.content\[0\]\.tool_call_id: found 'x'",
    ),
    (
        read_messages_api,
        {"messages": parts({"type": "tool_result", "content": "x"})},
        r"messages\[0\]\.content\[0\]\.tool_use_id: found null",
    ),
    (
        read_messages_api,
        {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        r"messages\[1\]\.content\[0\]\.input: found null",
    ),
    (
        read_messages_api,
        {"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
        r"messages\[1\]\.content\[0\]\.type: found 'redacted_thinking'",
    ),
    (read_messages_api, {"messages": [USER], "system": 3}, "system: found a number"),
    (
        read_messages_api,
        {"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]},
        r"tools\[0\]\.type: found 'bash_20250124'",
    ),
    (read_messages_api, {"messages": [USER], "tools": [{}]}, r"tools\[0\]\.name: found null"),
    (
        read_messages_api,
        {"messages": [USER], "tool_choice": {"type": "some"}},
        r"tool_choice\.type: found 'some'",
    ),
    (
        read_messages_api,
        {"messages": [USER], "output_config": {"effort": "colossal"}},
        r"output_config\.effort: found 'colossal'",
    ),
    (read_responses, {}, "input: found null"),
    (read_responses, {"input": []}, "input: found an empty list"),
    (read_responses, {"input": ["x"]}, r"input\[0\]: found a string"),
    (read_responses, {"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]\.type"),
    (read_responses, {"input": [{"role": "tool", "content": "x"}]}, r"input\[0\]\.role"),
    (read_responses, {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
    (read_responses, {"input": "x", "instructions": ["y"]}, "instructions: found a list"),
    (
        read_responses,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]},
        r"input\[0\]\.tool_call_id: found 'c'",
    ),
    (
        read_responses,
        {"input": [USER, {"type": "function_call", "call_id": "c", "arguments": "{}"}]},
        r"input\[1\]\.name: found null",
    ),
    (
        read_responses,
        {"input": "x", "tools": [{"type": "custom", "name": "f"}]},
        r"tools\[0\]\.type: found 'custom'",
    ),
    (
        read_responses,
        {"input": "x", "tools": [{"type": "namespace", "name": "a::b", "tools": []}]},
        r"tools\[0\]\.name: found the namespace 'a::b'",
    ),
    (read_responses, {"input": "x", "tool_choice": "perhaps"}, "tool_choice: found 'perhaps'"),
    (read_responses, {"input": "x", "reasoning": {"effort": 7}}, r"reasoning\.effort: found the"),
]


@pytest.mark.parametrize(
    ("reader", "body", "words"), BAD_BODIES, ids=[words for _, _, words in BAD_BODIES]
)
def test_bad_bodies(reader: Any, body: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        reader(body, V4_OFFICIAL).encode(V4_OFFICIAL)


@pytest.mark.parametrize(("value", "thinking"), [(True, True), (False, False)])
def test_switch_of_other_engines(value: bool, thinking: bool) -> None:
    for name in ("thinking", "enable_thinking"):
        body = {"messages": [USER], "chat_template_kwargs": {name: value}}
        assert read_chat_completions(body, V41).thinking is thinking


def test_numbers_as_effort_are_for_v41() -> None:
    body = {"messages": [USER], "reasoning_effort": 33}
    assert "Effort: 33 " in read_chat_completions(body, V41).encode(V41).text
    with pytest.raises(RequestError, match="33"):
        read_chat_completions(body, V4_OFFICIAL)


def test_hosted_search_is_left_out_with_a_note() -> None:
    conversation = read_responses({"input": "x", "tools": [{"type": "web_search"}]}, V41)
    assert conversation.tools == ()
    assert "web_search" in conversation.notes[0]


@pytest.mark.parametrize(("dialect", "name"), [(V41, "ns::f"), (V4_OFFICIAL, "ns__f")])
def test_namespaces(dialect: Any, name: str) -> None:
    inner = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body = {
        "input": [
            USER,
            {
                "type": "function_call",
                "call_id": "c",
                "name": "f",
                "namespace": "ns",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ],
        "tools": [{"type": "namespace", "name": "ns", "tools": [inner]}],
    }
    prompt = read_responses(body, dialect).encode(dialect)
    assert f'{{"name": "{name}"' in prompt.text
    assert f'invoke name="{name}">' in prompt.text
    (tool,) = prompt.tools
    assert (tool.name, tool.namespace, tool.local_name) == (name, "ns", "f")


def test_text_before_a_result_keeps_its_place() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    body = {
        "messages": [
            USER,
            {"role": "assistant", "content": [call]},
            *parts(
                {"type": "text", "text": "before"},
                {"type": "tool_result", "tool_use_id": "c", "content": "r"},
                {"type": "text", "text": "after"},
            ),
        ],
        "thinking": {"type": "disabled"},
    }
    text = read_messages_api(body, V41).encode(V41).text
    assert "<｜User｜>before\n\n<tool_result>r</tool_result>\n\nafter<｜Assistant｜>" in text


ODD_VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 10**5000, float("nan"), "", "x", "\ud800", "x" * 300, [], {}, [[]],
    [None], [{}], {"type": []}, {"type": {}}, {"type": "text"}, {"type": "tool_result"},
    {"type": "function"}, {"type": "image"}, {1: 2}, {"function": {"name": "f"}}, {"name": ["f"]},
    {"role": "user"}, {"role": "tool", "content": "x"}, b"bytes", object(),
]  # fmt: skip


def deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a body."""
    found = []
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        found.append((value, key))
        found += places(value[key])
    return found


@pytest.mark.parametrize("shape", ["chat", "messages", "responses"])
@pytest.mark.parametrize("dialect", [V4_OFFICIAL, V41], ids=lambda d: d.name)
def test_a_damaged_body_is_read_or_refused(shape: str, dialect: Any) -> None:
    """One value of a good body is replaced by an odd one: a prompt or a RequestError, no more."""
    readers = {
        "chat": read_chat_completions,
        "messages": read_messages_api,
        "responses": read_responses,
    }
    odd_values = [*ODD_VALUES, deep(50_000)]
    refusals = []
    for seed in range(400):
        rng = random.Random(f"{shape} {seed}")
        body = getattr(RequestMaker(rng, dialect), shape)()
        container, key = rng.choice(places(body))
        container[key] = rng.choice(odd_values)
        try:
            prompt = readers[shape](body, dialect).encode(dialect)
        except RequestError as error:
            refusals.append(str(error))
        else:
            prompt.text.encode()
    assert len(refusals) > 130
    assert all("found" in text and len(text) < 1000 for text in refusals)
