"""Bad input, limits and the choices of the encoder that no fixture covers."""

import json
from typing import Any

import pytest

from dsv4.chat import V4_OFFICIAL, V4_PREVIEW, V41, choose_dialect, encode_prompt, texts
from dsv4.chat.fields import MAX_TEXT_CHARS
from dsv4.errors import OptionError, RequestError
from tests.chat.support import v4_tokenizer, v41_tokenizer

USER = {"role": "user", "content": "q"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def called(*ids: str, **fields: Any) -> dict[str, Any]:
    calls = [{"id": i, "function": {"name": "f", "arguments": '{"a": 1}'}} for i in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


def result(call_id: str, content: Any = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"properties": value}
    return value


BAD_MESSAGES: list[tuple[list[Any], str]] = [
    ([], "messages: found an empty list"),
    ([USER, "hi"], r"messages\[1\]: found a string, expected an object"),
    ([USER, {"role": "robot", "content": "x"}], r"messages\[1\]\.role: found 'robot'"),
    ([{"content": "x"}], r"messages\[0\]\.role: found null"),
    ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role"),
    ([{"role": "user", "content": 3}], r"messages\[0\]\.content: found a number"),
    ([{"role": "user", "content": {"text": "x"}}], r"messages\[0\]\.content: found an object"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text"),
    ([{"role": "user", "content": [{"type": "audio"}]}], r"messages\[0\]\.content\[0\]\.type"),
    ([{"role": "user", "content": [7]}], r"messages\[0\]\.content\[0\]: found a number"),
    ([{"role": "user", "content": "a\ud800b"}], r"messages\[0\]\.content: found half of a surr"),
    ([{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}], r"content\[0\]\.text"),
    ([USER, called("c", reasoning_content="\ud800")], r"messages\[1\]\.reasoning_content"),
    ([USER, called("c", reasoning_content=["x"])], r"messages\[1\]\.reasoning_content"),
    ([USER, called("c", tool_calls={"id": 1})], r"messages\[1\]\.tool_calls: found an object"),
    ([USER, called("c", tool_calls=[{"id": "c"}])], r"messages\[1\]\.tool_calls\[0\]\.function"),
    (
        [USER, called("c", tool_calls=[{"id": "c", "function": {"arguments": "{}"}}])],
        r"messages\[1\]\.tool_calls\[0\]\.function\.name",
    ),
    (
        [USER, called("c", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": 3}}])],
        r"messages\[1\]\.tool_calls\[0\]\.function\.arguments: found a number",
    ),
    ([USER, called("c", "c"), result("c")], r"messages\[1\]\.tool_calls\[1\]\.id: found 'c' a sec"),
    ([USER, result("c")], r"messages\[1\]\.tool_call_id: found 'c'"),
    ([USER, called("c"), result("d")], r"messages\[2\]\.tool_call_id: found 'd'"),
    ([USER, called("c"), result("c"), result("c")], r"messages\[3\]\.tool_call_id: found a second"),
    ([USER, called("c")], r"messages\[1\]\.tool_calls: found no result for the call 'c'"),
    ([USER, called("c"), USER], r"messages\[1\]\.tool_calls: found no result"),
    ([USER, called("c"), called("d"), result("d")], r"messages\[1\]\.tool_calls: found no result"),
    ([{"role": "assistant", "content": "a", "prefix": True}, USER], r"messages\[0\]\.prefix"),
    ([{**USER, "prefix": True}], r"messages\[0\]\.prefix: found it on a user message"),
    ([{**USER, "tool_calls": [1]}], r"messages\[0\]\.tool_calls"),
    ([{**USER, "task": "action"}], r"messages\[0\]\.task: found a task"),
    ([{**USER, "task": "dance"}], r"messages\[0\]\.task: found 'dance'"),
    ([USER, called("c", prefix=True)], r"messages\[1\]\.tool_calls: found calls"),
    ([{"role": "assistant", "content": "a", "prefix": "yes"}], r"messages\[0\]\.prefix"),
    ([{"role": "user", "content": "x" * (MAX_TEXT_CHARS + 1)}], r"messages\[0\]\.content: found 8"),
    ([{"role": "user", "content": "x" * (MAX_TEXT_CHARS // 2)}] * 3, "messages: found .* in all"),
    ([USER] * 20_001, "messages: found 20001 entries"),
]


@pytest.mark.parametrize(
    ("messages", "words"), BAD_MESSAGES, ids=[words for _, words in BAD_MESSAGES]
)
@pytest.mark.parametrize("dialect", [V4_OFFICIAL, V41], ids=lambda d: d.name)
def test_bad_messages(messages: list[Any], words: str, dialect: Any) -> None:
    with pytest.raises(RequestError, match=words):
        encode_prompt(messages, dialect=dialect)


BAD_TOOLS: list[tuple[Any, str]] = [
    ({}, "tools: found an object"),
    ([{"type": "function"}], r"tools\[0\]\.function: found null"),
    ([{"type": "function", "function": {}}], r"tools\[0\]\.function\.name: found null"),
    ([{"function": {"name": ""}}], r"tools\[0\]\.function\.name: found an empty name"),
    ([{"function": {"name": 'a"b'}}], r"tools\[0\]\.function\.name"),
    ([{"function": {"name": "a\nb"}}], r"tools\[0\]\.function\.name"),
    ([{"function": {"name": "a::b::c"}}], r"tools\[0\]\.function\.name"),
    ([{"function": {"name": "x" * 257}}], r"tools\[0\]\.function\.name"),
    ([TOOL, TOOL], r"tools\[1\]\.function\.name: found 'f' a second time"),
    ([{"type": "web", "function": {"name": "f"}}], r"tools\[0\]\.type: found 'web'"),
    ([{"function": {"name": "f", "parameters": []}}], r"tools\[0\]\.function\.parameters"),
    ([{"function": {"name": "f", "description": 1}}], r"tools\[0\]\.function\.description"),
    ([{"function": {"name": "f", "parameters": nested(80)}}], r"parameters: found nested values"),
    ([{"function": {"name": "f", "parameters": nested(20_000)}}], "parameters: found nested"),
    ([{"function": {"name": "f", "parameters": {"a": "\ud800"}}}], "parameters: found half of"),
    ([{"function": {"name": "f", "parameters": {"\ud800": 1}}}], "parameters: found half of"),
    ([{"function": {"name": "f", "parameters": {"a": float("nan")}}}], "parameters: found nan"),
    ([{"function": {"name": "f", "parameters": {1: 1}}}], "parameters: found the key 1"),
    ([{"function": {"name": "f", "parameters": {"a": {1}}}}], "parameters: found set"),
]


@pytest.mark.parametrize(("tools", "words"), BAD_TOOLS, ids=[words for _, words in BAD_TOOLS])
@pytest.mark.parametrize("at_server", [True, False])
def test_bad_tools(tools: Any, words: str, at_server: bool) -> None:
    with pytest.raises(RequestError, match=words):
        encode_prompt([USER], dialect=V41, tools=tools, at_server=at_server)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "dream"}, "mode: found 'dream'"),
        ({"effort": "huge"}, "reasoning_effort: found 'huge'"),
        ({"effort": 50}, "reasoning_effort: found the number 50"),
        ({"effort": True}, "reasoning_effort: found True"),
        ({"effort": 1.5}, "reasoning_effort: found 1.5"),
        ({"effort": []}, "reasoning_effort: found a list"),
        ({"tool_choice": "maybe"}, "tool_choice: found 'maybe'"),
        ({"tool_choice": {"function": {}}}, r"tool_choice\.function\.name"),
        ({"tool_choice": "required"}, "tool_choice: found 'required' without tools"),
        ({"tool_choice": {"function": {"name": "g"}}, "tools": [TOOL]}, "the name 'g'"),
        ({"response_format": "json"}, "response_format: found a string"),
        ({"response_format": {"type": "xml"}}, r"response_format\.type: found 'xml'"),
        ({"response_format": {"type": "json_schema"}}, r"response_format\.json_schema: found null"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(99)}}},
            "found nested values",
        ),
        ({"continue_final": True}, r"messages\[0\]\.role: found 'user' as the message to continue"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        encode_prompt([USER], dialect=V4_PREVIEW, **options)


@pytest.mark.parametrize("effort", [0, 101, -1, 1 << 70])
def test_effort_out_of_range(effort: int) -> None:
    with pytest.raises(RequestError, match="1 to 100"):
        encode_prompt([USER], dialect=V41, effort=effort)


def test_control_characters_are_text() -> None:
    content = "".join(map(chr, range(32))) + "\x7f\x85\u2028\ufeff\uffff"
    prompt = encode_prompt([{"role": "user", "content": content}], dialect=V4_PREVIEW)
    assert content in prompt.text
    assert content in v4_tokenizer().decode(prompt.ids(v4_tokenizer()))


def test_a_megabyte_of_content_arrives_whole() -> None:
    content = "日本語 and words \n" * 60_000
    prompt = encode_prompt([{"role": "user", "content": content}], dialect=V4_PREVIEW, mode="chat")
    ids = prompt.ids(v4_tokenizer())
    assert v4_tokenizer().decode(ids[2:-2]) == content


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "\\ud800"}', '{"a": NaN}', '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}", "[" * 9999, ""],
    ids=lambda text: text[:20],
)
def test_arguments_that_json_cannot_carry_stay_text(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, result("c")]
    prompt = encode_prompt(messages, dialect=V4_PREVIEW)
    assert f'name="arguments" string="true">{arguments}</' in prompt.text
    assert prompt.ids(v4_tokenizer())


def test_twice_encoded_arguments_are_decoded_in_v41_only() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps('{"a": 1}')}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, result("c")]
    assert 'name="a" string="false">1<' in encode_prompt(messages, dialect=V41).text
    assert 'name="arguments"' in encode_prompt(messages, dialect=V4_OFFICIAL).text


def test_results_may_be_mixed_with_text() -> None:
    messages = [USER, called("a", "b"), result("b", "B"), USER, result("a", "A")]
    text = encode_prompt(messages, dialect=V41, mode="chat").text
    between = "<tool_result>A</tool_result>\n\nq\n\n<tool_result>B</tool_result>"
    assert between in text


def test_tools_that_join_later() -> None:
    late = {"role": "system", "content": "more", "tools": [TOOL]}
    messages = [USER, {"role": "assistant", "content": "a"}, late, USER]
    prompt = encode_prompt(messages, dialect=V41, mode="chat")
    assert "<｜System｜>more\n\n### Updated Tool Schemas\n\n{" in prompt.text
    assert [tool.name for tool in prompt.tools] == ["f"]
    moved = encode_prompt(messages, dialect=V4_OFFICIAL, mode="chat").text
    assert moved.startswith(texts.BOS + "more\n\n## Tools")


def test_nothing_is_hidden_by_tool_choice_none() -> None:
    prompt = encode_prompt([USER], dialect=V41, tools=[TOOL], tool_choice="none")
    assert prompt.tools == ()
    assert "## Tools" not in prompt.text


@pytest.mark.parametrize(
    ("last", "mode", "start"),
    [
        ({}, "thinking", ("reasoning", False)),
        ({}, "chat", ("answer", False)),
        ({"content": "a"}, "thinking", ("answer", True)),
        ({"content": "a"}, "chat", ("answer", True)),
        ({"reasoning_content": "r"}, "thinking", ("reasoning", True)),
        ({"reasoning_content": "r"}, "chat", ("answer", False)),
    ],
)
def test_where_parsing_starts(last: dict[str, str], mode: str, start: tuple[str, bool]) -> None:
    messages = [USER, {"role": "assistant", **last}]
    prompt = encode_prompt(messages, dialect=V41, mode=mode, continue_final=True)
    assert prompt.start == start


def test_forced_call_starts_inside_the_block() -> None:
    options: dict[str, Any] = {"dialect": V41, "tools": [TOOL], "tool_choice": "required"}
    prompt = encode_prompt([USER], mode="chat", **options)
    assert prompt.start == ("block", False)
    assert prompt.text.endswith("</think>\n\n<｜DSML｜ calls>\n")
    assert prompt.ids(v41_tokenizer())[-1] == v41_tokenizer().encode("calls>\n")[-1]
    assert encode_prompt([USER], mode="thinking", **options).start == ("reasoning", False)


def test_choose_dialect(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert choose_dialect("v4.1") is V41
    assert choose_dialect(config={"model_type": "deepseek_v41"}) is V41
    assert choose_dialect(config={"architectures": ["DeepseekV41ForCausalLM"]}) is V41
    assert choose_dialect(has_system_marker=True) is V41
    assert choose_dialect("v4", has_system_marker=True) is V4_PREVIEW
    assert choose_dialect(config={"model_type": "deepseek_v4", "architectures": None}) is V4_PREVIEW
    assert "v4-preview" in caplog.text
    assert choose_dialect(folder=tmp_path / "V4-Flash-0731") is V4_OFFICIAL
    assert choose_dialect(folder=tmp_path / "renamed") is V4_PREVIEW
    with pytest.raises(OptionError, match="v5"):
        choose_dialect("v5")


@pytest.mark.parametrize(
    ("text", "dialect"),
    [("EFFORTS = 'Beyond maximum'", V4_OFFICIAL), ("MAX = 'Absolute maximum'", V4_PREVIEW)],
)
def test_dialect_from_the_encoder_file(tmp_path: Any, text: str, dialect: Any) -> None:
    folder = tmp_path / "renamed-0731"
    (folder / "encoding").mkdir(parents=True)
    (folder / "encoding" / "encoder.py").write_text(f"raise SystemExit\n{text}\n")
    assert choose_dialect(folder=folder) is dialect
