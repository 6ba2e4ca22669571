"""The body of a /v1/responses request: a list of items instead of messages."""

from collections.abc import Mapping
from typing import Any

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
    read_call_name,
    read_content,
    read_function,
    read_name,
)
from dsv4.chat.requests.thinking import decide, read_effort
from dsv4.chat.tool_choice import ToolChoice, read_allowed_tools

_ROLES = ("user", "assistant", "system", "developer")
# Tools that the publisher's service runs itself. Clients declare them by default, and the model
# works without them, so they are ignored with a note instead of failing the request.
_HOSTED_TOOLS = ("web_search", "web_search_preview")


def read_responses(body: object, dialect: Dialect) -> Conversation:
    fields = read_object(body, "body")
    if fields.get("previous_response_id") is not None:
        fail(
            "previous_response_id",
            "an id",
            "none; responses are not stored, so send the whole conversation in 'input'",
        )
    items = _Items(dialect)
    instructions = fields.get("instructions")
    if instructions is not None:
        text = read_text(instructions, "instructions")
        items.messages.append(Message("system", "instructions", (text,)))
    items.read(fields.get("input"))
    reasoning = read_object(fields.get("reasoning") or {}, "reasoning")
    tools, notes = _tools(fields.get("tools"), dialect)
    effort = read_effort(reasoning.get("effort"), "reasoning.effort", dialect)
    return Conversation(
        messages=tuple(items.messages),
        tools=tools,
        tool_choice=_tool_choice(fields.get("tool_choice"), dialect),
        response_format=_format(fields.get("text")),
        notes=notes,
        **decide(None, effort),
    )


class _Items:
    """Collects items into messages: one assistant message gathers what one turn produced."""

    def __init__(self, dialect: Dialect) -> None:
        self.messages: list[Message] = []
        self._dialect = dialect
        self._path = ""
        self._reasoning: list[str] = []
        self._content: list[Piece] = []
        self._calls: list[ToolCall] = []
        self._call_ids: set[str] = set()
        self._is_open = False

    def read(self, value: object) -> None:
        if isinstance(value, str):
            self.messages.append(Message("user", "input", (read_text(value, "input"),)))
            return
        items = read_list(value, "input", MAX_MESSAGES)
        if not items:
            fail("input", "an empty list", "a text or at least one item")
        for place, item in enumerate(items):
            self._item(read_object(item, f"input[{place}]"), f"input[{place}]")
        self._close()

    def _item(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, path)
        elif kind == "reasoning":
            if self._content or self._calls:
                self._close()
            self._open(path)
            self._reasoning += _reasoning_texts(item, path)
        elif kind == "function_call":
            self._open(path)
            self._calls.append(self._call(item, path))
        elif kind == "function_call_output":
            self._close()
            call_id = read_text(item.get("call_id"), f"{path}.call_id")
            content = read_content(item.get("output"), f"{path}.output", "tool")
            self.messages.append(Message("tool", path, content, call_id=call_id))
        elif kind == "item_reference":
            fail(
                f"{path}.type",
                f"a reference to the item {show(item.get('id'))}",
                "the item itself; responses are not stored. Send what an earlier answer's 'output' "
                "held; with store: false client libraries do so themselves",
            )
        else:
            fail(
                f"{path}.type",
                show(kind),
                "message, reasoning, function_call or function_call_output",
            )

    def _message(self, item: Mapping[str, Any], path: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            fail(f"{path}.role", show(role), f"one of {', '.join(_ROLES)}")
        content = read_content(item.get("content"), f"{path}.content", role)
        if role != "assistant":
            self._close()
            self.messages.append(Message(role, path, content))
            return
        if self._calls:
            self._close()
        self._open(path)
        self._content += ["\n\n"] if self._content else []
        self._content += content

    def _call(self, item: Mapping[str, Any], path: str) -> ToolCall:
        call_id = read_text(item.get("call_id"), f"{path}.call_id")
        if call_id in self._call_ids:
            fail(
                f"{path}.call_id",
                f"{show(call_id)} a second time",
                "an id of its own for each call",
            )
        self._call_ids.add(call_id)
        name = read_call_name(item.get("name"), f"{path}.name")
        if item.get("namespace") is not None:
            namespace = _namespace(item["namespace"], f"{path}.namespace")
            name = namespace + _separator(self._dialect) + name
        return ToolCall(call_id, name, read_text(item.get("arguments"), f"{path}.arguments"))

    def _open(self, path: str) -> None:
        if not self._is_open:
            self._is_open, self._path = True, path

    def _close(self) -> None:
        if self._is_open:
            self.messages.append(
                Message(
                    "assistant",
                    self._path,
                    tuple(self._content),
                    reasoning="\n".join(self._reasoning),
                    calls=tuple(self._calls),
                )
            )
        self._is_open = False
        self._reasoning, self._content, self._calls = [], [], []
        self._call_ids = set()


def _reasoning_texts(item: Mapping[str, Any], path: str) -> list[str]:
    """The reasoning itself; a summary is not the model's text and cannot replace it."""
    parts = read_list(item.get("content") or [], f"{path}.content", MAX_MESSAGES)
    return [
        read_text(
            read_object(part, f"{path}.content[{place}]").get("text"),
            f"{path}.content[{place}].text",
        )
        for place, part in enumerate(parts)
    ]


def _separator(dialect: Dialect) -> str:
    """Between namespace and name: V4.1 was trained on '::', V4 on plain names."""
    return "::" if dialect.is_v41 else "__"


def _namespace(value: object, path: str) -> str:
    name = read_name(value, path)
    if "::" in name:
        fail(path, f"the namespace {show(name)}", "one without '::'")
    return name


def _tools(value: object, dialect: Dialect) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    tools: list[Tool] = []
    notes: list[str] = []
    for place, entry in enumerate(read_list(value or [], "tools", MAX_TOOLS)):
        path = f"tools[{place}]"
        fields = read_object(entry, path)
        kind = fields.get("type")
        if kind == "function":
            tools.append(read_function(fields, path))
        elif kind == "namespace":
            namespace = _namespace(fields.get("name"), f"{path}.name")
            members = read_list(fields.get("tools"), f"{path}.tools", MAX_TOOLS)
            for inner, member in enumerate(members):
                where = f"{path}.tools[{inner}]"
                tools.append(
                    read_function(
                        read_object(member, where),
                        where,
                        namespace=namespace,
                        separator=_separator(dialect),
                    )
                )
        elif kind in _HOSTED_TOOLS:
            notes.append(f"{path}: {kind} is not available and was left out")
        else:
            fail(f"{path}.type", show(kind), "function or namespace")
    check_unique(tools)
    return tuple(tools), tuple(notes)


def _tool_choice(value: object, dialect: Dialect) -> ToolChoice:
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            fail("tool_choice", show(value), "auto, none, required or a named function")
        return ToolChoice(value)
    fields = read_object(value, "tool_choice")
    if fields.get("type") == "allowed_tools":
        return read_allowed_tools(
            fields, "tool_choice", lambda item: _chosen(item, "tool_choice.tools", dialect)
        )
    if fields.get("type") != "function":
        fail("tool_choice.type", show(fields.get("type")), "function or allowed_tools")
    return ToolChoice("named", _chosen(fields, "tool_choice", dialect))


def _chosen(fields: Mapping[str, Any], path: str, dialect: Dialect) -> str:
    name = read_text(fields.get("name"), f"{path}.name")
    if fields.get("namespace") is None:
        return name
    return _namespace(fields["namespace"], f"{path}.namespace") + _separator(dialect) + name


def _format(value: object) -> Mapping[str, Any] | None:
    found = read_object(value or {}, "text").get("format")
    if found is None:
        return None
    fields = read_object(found, "text.format")
    if fields.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": fields.get("schema")}}
    return fields
