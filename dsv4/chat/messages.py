"""Validated messages and tools, which the encoder relies on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dsv4.chat import jsontext, texts
from dsv4.chat.fields import (
    check_json,
    fail,
    kind_of,
    read_flag,
    read_list,
    read_object,
    read_optional_text,
    read_text,
    show,
)

MAX_MESSAGES = 20_000
MAX_TOOLS = 2_000
MAX_NAME_CHARS = 256

ROLES = ("system", "user", "assistant", "tool", "latest_reminder", "developer")

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_IMAGE_PARTS = ("image_url", "image", "input_image")


class Image(Enum):
    """Placeholder for an image in content; its pixels are passed outside the prompt."""

    PLACEHOLDER = 0


Piece = str | Image


@dataclass(frozen=True)
class ToolCall:
    id: str | None
    name: str
    arguments: str  # JSON text as the client sent it


@dataclass(frozen=True)
class Tool:
    """`schema` is shown in the prompt; `properties` is the part that the parser needs."""

    name: str
    schema: Mapping[str, Any]
    path: str
    namespace: str | None = None  # as the client named it; `name` then begins with it
    local_name: str = ""
    is_strict: bool = False  # arguments must keep to the schema

    @property
    def properties(self) -> frozenset[str]:
        parameters = self.schema.get("parameters")
        found = parameters.get("properties") if isinstance(parameters, Mapping) else None
        return frozenset(found) if isinstance(found, Mapping) else frozenset()


@dataclass(frozen=True)
class Message:
    role: str
    path: str
    content: tuple[Piece, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    prefix: bool = False
    task: str | None = None
    tools: tuple[Tool, ...] = ()
    response_format: Any = None

    @property
    def is_blank(self) -> bool:
        """Whether a system message is empty."""
        return not (any(self.content) or self.tools or self.response_format is not None)


def read_name(value: object, path: str) -> str:
    """A tool's name. Tags quote it without escapes, so some characters are not allowed."""
    name = read_text(value, path)
    if not name:
        fail(path, "an empty name", "the tool's name")
    if len(name) > MAX_NAME_CHARS:
        fail(path, f"a name of {len(name)} characters", f"at most {MAX_NAME_CHARS}")
    if any(char in '"<>' or not char.isprintable() for char in name):
        fail(path, f"the name {show(name)}", "a name without quotes, angle brackets or line breaks")
    if name.count("::") > 1:
        fail(path, f"the name {show(name)}", "at most one '::' between namespace and name")
    return name


def read_content(value: object, path: str, role: str) -> tuple[Piece, ...]:
    """Text, or a list of parts, which are joined with blank lines."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (read_text(value, path),)
    if not isinstance(value, (list, tuple)):
        fail(path, kind_of(value), "a string, a list of parts or null")
    pieces: list[Piece] = []
    for place, part in enumerate(read_list(value, path, MAX_MESSAGES)):
        if place:
            pieces.append("\n\n")
        pieces.append(read_part(part, f"{path}[{place}]", role))
    return tuple(pieces)


def read_part(part: object, path: str, role: str) -> Piece:
    if isinstance(part, str):
        return read_text(part, path)
    fields = read_object(part, path)
    kind = read_text(fields.get("type"), f"{path}.type")
    if kind in _TEXT_PARTS:
        field = _TEXT_PARTS[kind]
        return read_text(fields.get(field), f"{path}.{field}")
    if kind in _IMAGE_PARTS:
        return Image.PLACEHOLDER
    if role == "tool":
        return texts.UNSUPPORTED_PART.replace("{type}", kind)
    fail(f"{path}.type", show(kind), "'text'; convert other parts to text")


def read_calls(value: object, path: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    calls = []
    seen: set[str] = set()
    for place, entry in enumerate(read_list(value, path, MAX_TOOLS)):
        where = f"{path}[{place}]"
        fields = read_object(entry, where)
        function = read_object(fields.get("function"), f"{where}.function")
        call_id = fields.get("id")
        if call_id is not None:
            call_id = read_text(call_id, f"{where}.id")
            if call_id in seen:
                fail(
                    f"{where}.id",
                    f"{show(call_id)} a second time",
                    "an id of its own for each call",
                )
            seen.add(call_id)
        arguments = function.get("arguments")
        calls.append(
            ToolCall(
                id=call_id,
                name=read_call_name(function.get("name"), f"{where}.function.name"),
                arguments=read_arguments(arguments, f"{where}.function.arguments"),
            )
        )
    return tuple(calls)


def read_call_name(value: object, path: str) -> str:
    name = read_text(value, path)
    if not name:
        fail(path, "an empty name", "the name of the tool that was called")
    return name


def read_arguments(value: object, path: str) -> str:
    """Arguments as JSON text; an object is written as JSON."""
    if isinstance(value, Mapping):
        check_json(value, path)
        return jsontext.dump(value)
    return read_text(value, path)


def read_tools(value: object, path: str, *, as_received: bool) -> tuple[Tool, ...]:
    """Tool declarations. `as_received` keeps every field of a function; a server keeps three."""
    if value is None:
        return ()
    tools: list[Tool] = []
    for place, entry in enumerate(read_list(value, path, MAX_TOOLS)):
        where = f"{path}[{place}]"
        fields = read_object(entry, where)
        if fields.get("type", "function") != "function":
            fail(f"{where}.type", show(fields["type"]), "'function'")
        function = read_object(fields.get("function"), f"{where}.function")
        tools.append(read_function(function, f"{where}.function", as_received=as_received))
    check_unique(tools)
    return tuple(tools)


def read_function(
    function: Mapping[str, Any],
    path: str,
    *,
    as_received: bool = False,
    namespace: str | None = None,
    separator: str = "::",
) -> Tool:
    local_name = read_name(function.get("name"), f"{path}.name")
    name = local_name if namespace is None else namespace + separator + local_name
    description = read_optional_text(function.get("description"), f"{path}.description")
    parameters = function.get("parameters")
    if parameters is not None:
        check_json(read_object(parameters, f"{path}.parameters"), f"{path}.parameters")
    if as_received:
        check_json(function, path)
        return Tool(name, function, path, namespace, local_name)
    is_strict = read_flag(function.get("strict"), f"{path}.strict")
    schema = {
        "name": name,
        "description": description,
        "parameters": {} if parameters is None else parameters,
    }
    return Tool(name, schema, path, namespace, local_name, is_strict)


def check_unique(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            fail(
                f"{tool.path}.name",
                f"{show(tool.name)} a second time",
                "a name of its own per tool",
            )
        seen.add(tool.name)


def read_messages(value: object, *, as_received: bool = False) -> tuple[Message, ...]:
    """Messages in the shape of chat completions. `as_received`: see `read_tools`."""
    entries = read_list(value, "messages", MAX_MESSAGES)
    if not entries:
        fail("messages", "an empty list", "at least one message")
    return tuple(
        read_message(entry, f"messages[{place}]", as_received=as_received)
        for place, entry in enumerate(entries)
    )


def read_message(entry: object, path: str, *, as_received: bool = False) -> Message:
    fields = read_object(entry, path)
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        fail(f"{path}.role", show(role), f"one of {', '.join(ROLES)}")
    _refuse_misplaced(fields, role, path)
    message = Message(role, path, read_content(fields.get("content"), f"{path}.content", role))
    if role == "assistant":
        return _read_assistant(fields, message)
    if role == "tool":
        call_id = fields.get("tool_call_id")
        if call_id is not None:
            call_id = read_text(call_id, f"{path}.tool_call_id")
        return Message(role, path, message.content, call_id=call_id)
    if role in ("system", "developer"):
        response_format = fields.get("response_format")
        check_json(response_format, f"{path}.response_format")
        tools = read_tools(fields.get("tools"), f"{path}.tools", as_received=as_received)
        return Message(role, path, message.content, tools=tools, response_format=response_format)
    return Message(role, path, message.content, task=_read_task(fields, path))


def _read_assistant(fields: Mapping[str, Any], message: Message) -> Message:
    path = message.path
    reasoning_field = "reasoning_content" if fields.get("reasoning_content") else "reasoning"
    return Message(
        "assistant",
        path,
        message.content,
        reasoning=read_optional_text(fields.get(reasoning_field), f"{path}.{reasoning_field}"),
        calls=read_calls(fields.get("tool_calls"), f"{path}.tool_calls"),
        prefix=read_flag(fields.get("prefix"), f"{path}.prefix")
        or read_flag(fields.get("wo_eos"), f"{path}.wo_eos"),
        task=_read_task(fields, path),
    )


def _read_task(fields: Mapping[str, Any], path: str) -> str | None:
    task = fields.get("task")
    if task is not None and (not isinstance(task, str) or task not in texts.TASKS):
        fail(f"{path}.task", show(task), f"one of {', '.join(texts.TASKS)}")
    return task


def _refuse_misplaced(fields: Mapping[str, Any], role: str, path: str) -> None:
    """Refuse fields of another role: dropping them silently would change the meaning."""
    owners = {
        "tool_calls": ("assistant",),
        "prefix": ("assistant",),
        "wo_eos": ("assistant",),
        "tool_call_id": ("tool",),
        "task": ("user", "assistant"),
        "tools": ("system", "developer"),
        "response_format": ("system", "developer"),
    }
    for field, roles in owners.items():
        if fields.get(field) and role not in roles:
            fail(f"{path}.{field}", f"it on a {role} message", f"it only on {' or '.join(roles)}")
