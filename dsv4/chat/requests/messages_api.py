"""The body of a /v1/messages request: content blocks instead of roles for tools."""

from collections.abc import Iterator, Mapping
from typing import Any

from dsv4.chat import texts
from dsv4.chat.dialect import Dialect
from dsv4.chat.encode import Conversation
from dsv4.chat.fields import fail, read_list, read_object, read_text, show
from dsv4.chat.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Message,
    Piece,
    Tool,
    ToolCall,
    check_unique,
    read_arguments,
    read_call_name,
    read_content,
    read_function,
    read_part,
)
from dsv4.chat.requests.thinking import decide, read_effort, read_switch
from dsv4.chat.tool_choice import ToolChoice

# A block that one client sends for accounting; it is not meant for the model.
_BILLING_PREFIX = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "named"}


def read_messages_api(body: object, dialect: Dialect) -> Conversation:
    """The dialect matters: V4 writes a system message between others as a user reminder."""
    fields = read_object(body, "body")
    entries = read_list(fields.get("messages"), "messages", MAX_MESSAGES)
    if not entries:
        fail("messages", "an empty list", "at least one message")
    messages = list(_system(fields.get("system")))
    for place, entry in enumerate(entries):
        messages += _message(entry, f"messages[{place}]", dialect)
    config = read_object(fields.get("output_config") or {}, "output_config")
    return Conversation(
        messages=tuple(messages),
        tools=_tools(fields.get("tools")),
        tool_choice=_tool_choice(fields.get("tool_choice")),
        response_format=_format(config.get("format")),
        continue_final=messages[-1].role == "assistant" and not messages[-1].calls,
        **decide(
            read_switch(fields.get("thinking"), "thinking"),
            read_effort(config.get("effort"), "output_config.effort", dialect),
        ),
    )


def _system(value: object) -> Iterator[Message]:
    if isinstance(value, list):
        value = [part for part in value if not _is_billing(part)]
    content = read_content(value, "system", "system")
    if content:
        yield Message("system", "system", content)


def _is_billing(part: object) -> bool:
    text = part.get("text") if isinstance(part, Mapping) else None
    return isinstance(text, str) and text.startswith(_BILLING_PREFIX)


def _message(entry: object, path: str, dialect: Dialect) -> Iterator[Message]:
    fields = read_object(entry, path)
    role, content = fields.get("role"), fields.get("content")
    where = f"{path}.content"
    if role == "user":
        yield from _user(content, where)
    elif role == "assistant":
        yield _assistant(content, where)
    elif role == "system":
        pieces = read_content(content, where, "system")
        if dialect.is_v41:
            yield Message("system", path, pieces)
        else:
            before, _, after = texts.SYSTEM_REMINDER.partition("{content}")
            yield Message("user", path, (before, *pieces, after))
    else:
        fail(f"{path}.role", show(role), "user, assistant or system")


def _user(content: object, path: str) -> Iterator[Message]:
    """Text and results of one message; each run of text becomes its own message."""
    if not isinstance(content, list):
        yield Message("user", path, read_content(content, path, "user"))
        return
    run: list[Any] = []
    run_at = 0
    for place, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") == "tool_result":
            if run:
                yield Message("user", path, _parts(run, path, run_at))
            run, run_at = [], place + 1
            where = f"{path}[{place}]"
            yield Message(
                "tool",
                where,
                read_content(part.get("content"), f"{where}.content", "tool"),
                call_id=read_text(part.get("tool_use_id"), f"{where}.tool_use_id"),
            )
        else:
            run.append(part)
    if run or not content:
        yield Message("user", path, _parts(run, path, run_at))


def _parts(run: list[Any], path: str, first: int) -> tuple[Piece, ...]:
    """Parts joined with blank lines; `first` is the index the client gave to the first."""
    pieces: list[Piece] = []
    for place, part in enumerate(run, first):
        pieces += ["\n\n"] if pieces else []
        pieces.append(read_part(part, f"{path}[{place}]", "user"))
    return tuple(pieces)


def _assistant(content: object, path: str) -> Message:
    if not isinstance(content, list):
        return Message("assistant", path, read_content(content, path, "assistant"))
    reasoning: list[str] = []
    answer: list[Piece] = []
    calls: list[ToolCall] = []
    call_ids: set[str] = set()
    for place, part in enumerate(content):
        where = f"{path}[{place}]"
        fields = read_object(part, where)
        kind = fields.get("type")
        if kind == "thinking":
            reasoning.append(read_text(fields.get("thinking"), f"{where}.thinking"))
        elif kind == "tool_use":
            calls.append(_tool_use(fields, where, call_ids))
        else:
            answer += ["\n\n"] if answer else []
            answer.append(read_part(part, where, "assistant"))
    return Message(
        "assistant",
        path,
        tuple(answer),
        reasoning="\n\n".join(reasoning),
        calls=tuple(calls),
    )


def _tool_use(fields: Mapping[str, Any], path: str, earlier: set[str]) -> ToolCall:
    call_id = read_text(fields.get("id"), f"{path}.id")
    if call_id in earlier:
        fail(f"{path}.id", f"{show(call_id)} a second time", "an id of its own for each call")
    earlier.add(call_id)
    arguments = read_object(fields.get("input"), f"{path}.input")
    return ToolCall(
        id=call_id,
        name=read_call_name(fields.get("name"), f"{path}.name"),
        arguments=read_arguments(arguments, f"{path}.input"),
    )


def _tools(value: object) -> tuple[Tool, ...]:
    if value is None:
        return ()
    tools = []
    for place, entry in enumerate(read_list(value, "tools", MAX_TOOLS)):
        path = f"tools[{place}]"
        fields = read_object(entry, path)
        if fields.get("type") not in (None, "custom"):
            fail(f"{path}.type", show(fields["type"]), "a tool of the client, with input_schema")
        function = {
            "name": fields.get("name"),
            "description": fields.get("description"),
            "parameters": fields.get("input_schema"),
            "strict": fields.get("strict"),
        }
        tools.append(read_function(function, path))
    check_unique(tools)
    return tuple(tools)


def _tool_choice(value: object) -> ToolChoice:
    if value is None:
        return ToolChoice()
    fields = read_object(value, "tool_choice")
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _CHOICES:
        fail("tool_choice.type", show(kind), f"one of {', '.join(_CHOICES)}")
    name = read_text(fields.get("name"), "tool_choice.name") if kind == "tool" else None
    return ToolChoice(_CHOICES[kind], name)


def _format(value: object) -> Mapping[str, Any] | None:
    if value is None:
        return None
    fields = read_object(value, "output_config.format")
    if fields.get("type") != "json_schema":
        fail("output_config.format.type", show(fields.get("type")), "json_schema")
    return {"type": "json_schema", "json_schema": {"schema": fields.get("schema")}}
