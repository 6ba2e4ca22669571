"""Encodes messages, tools and options as a prompt in the model's training format.

`encode_prompt` is the entry point for direct use; `Conversation` is the same with validated parts,
built by the readers of the three request shapes (`requests/`). A prompt is a list of segments:
control markers, and plain text in which no marker is ever recognised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4.chat import jsontext, texts
from dsv4.chat.dialect import Dialect
from dsv4.chat.fields import check_json, fail, read_object, show
from dsv4.chat.messages import (
    Image,
    Message,
    Piece,
    Tool,
    check_unique,
    read_messages,
    read_tools,
)
from dsv4.chat.prompt import Prompt, PromptWriter, Start, write_calls, write_tools
from dsv4.chat.tool_choice import ToolChoice, read_tool_choice
from dsv4.chat.turns import Turn, build_turns, check_results

__all__ = ["Conversation", "Prompt", "encode_prompt"]


@dataclass(frozen=True)
class Conversation:
    """Everything that determines a prompt, already validated.

    `at_server` applies a server's rules: developer is system, every prompt ends in an open
    assistant turn, tool results are checked. Without it the publisher's encoder sets the rules:
    the header is written only after a last user-like turn, and tasks are allowed.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: bool = True
    effort: str | int | None = None
    response_format: Any = None  # as in chat completions
    drop_thinking: bool = True
    add_bos: bool = True
    continue_final: bool = False
    at_server: bool = True
    notes: tuple[str, ...] = ()  # parts of the request that were recognised but not used

    def encode(self, dialect: Dialect) -> Prompt:
        return _Encoder(self, dialect).encode()


def encode_prompt(
    messages: Sequence[Mapping[str, Any]],
    *,
    dialect: Dialect,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    mode: str = "thinking",
    effort: str | int | None = None,
    response_format: Mapping[str, Any] | None = None,
    drop_thinking: bool = True,
    add_bos: bool = True,
    continue_final: bool = False,
    at_server: bool = True,
) -> Prompt:
    """Encode messages in the shape of chat completions. See `Conversation` for `at_server`."""
    if mode not in ("thinking", "chat"):
        fail("mode", show(mode), "'thinking' or 'chat'")
    return Conversation(
        messages=read_messages(messages, as_received=not at_server),
        tools=read_tools(tools, "tools", as_received=not at_server),
        tool_choice=read_tool_choice(tool_choice),
        thinking=mode == "thinking",
        effort=effort,
        response_format=response_format,
        drop_thinking=drop_thinking,
        add_bos=add_bos,
        continue_final=continue_final,
        at_server=at_server,
    ).encode(dialect)


def response_schema(value: object, dialect: Dialect) -> tuple[str, Any] | None:
    """(text, schema to fill in) of a response format, or None if the prompt says nothing."""
    if value is None:
        return None
    fields = read_object(value, "response_format")
    kind = fields.get("type")
    if kind in ("text", "regex"):
        return None
    if kind == "json_object":
        if dialect.is_v41:
            return texts.RESPONSE_FORMAT, {"type": "json_object"}
        return texts.JSON_OBJECT_V4, None
    if kind == "json_schema":
        outer = read_object(fields.get("json_schema"), "response_format.json_schema")
        path = "response_format.json_schema.schema"
        schema = read_object(outer.get("schema"), path)
        check_json(schema, path)
        return texts.RESPONSE_FORMAT, schema
    fail("response_format.type", show(kind), "text, json_object, json_schema or regex")


class _Encoder:
    """One encoding; a class because the parts of a prompt share many settings."""

    def __init__(self, conversation: Conversation, dialect: Dialect) -> None:
        self._request = conversation
        self._dialect = dialect
        self._out = PromptWriter(dialect)
        self._tools = self._active_tools()
        self._turns: list[Turn] = []
        self._keep = False
        self._last_user = -1
        self._continued: Message | None = None

    def encode(self) -> Prompt:
        messages = [self._prepared(message) for message in self._request.messages]
        self._continued = self._continued_message(messages)
        if self._request.at_server:
            check_results(messages)
        self._turns = build_turns(messages, self._dialect, extra=self._extra_message())
        self._keep = not self._request.drop_thinking or any(
            turn.message.tools for turn in self._turns
        )
        self._find_last_user()
        self._drop_developers()
        self._write_start()
        for place, turn in enumerate(self._turns):
            self._write_turn(place, turn)
        start = self._write_end()
        return self._out.finish(start, self._declared())

    def _active_tools(self) -> tuple[Tool, ...]:
        choice, tools = self._request.tool_choice, self._request.tools
        if choice.kind == "none":
            return ()
        if choice.kind == "named":
            tools = tuple(tool for tool in tools if tool.name == choice.name)
            if not tools:
                fail("tool_choice", f"the name {show(choice.name)}", "the name of a declared tool")
        elif choice.kind == "required" and not tools:
            fail("tool_choice", "'required' without tools", "at least one tool, or 'auto'")
        for name in choice.allowed or ():
            if all(tool.name != name for tool in tools):
                fail("tool_choice", f"the name {show(name)}", "the names of declared tools")
        return tools

    def _prepared(self, message: Message) -> Message:
        """Apply request-dependent rules: tool choice none, developer at a server."""
        role, tools = message.role, message.tools
        if self._request.at_server:
            role = "system" if role == "developer" else role
            if message.task is not None:
                fail(f"{message.path}.task", "a task", "none; tasks are for direct use only")
        if self._request.tool_choice.kind == "none":
            tools = ()
        if self._dialect.is_v41 and role == "assistant" and Image.PLACEHOLDER in message.content:
            fail(f"{message.path}.content", "an image", "text only in an assistant message")
        if role == message.role and tools is message.tools:
            return message
        return Message(
            role,
            message.path,
            message.content,
            tools=tools,
            response_format=message.response_format,
            task=message.task,
        )

    def _continued_message(self, messages: Sequence[Message]) -> Message | None:
        for message in messages[:-1]:
            if message.prefix:
                fail(f"{message.path}.prefix", "true", "it only on the last message")
        last = messages[-1]
        if not (last.prefix or self._request.continue_final):
            return None
        if last.role != "assistant":
            fail(
                f"{last.path}.role",
                f"{last.role!r} as the message to continue",
                "an assistant message at the end",
            )
        if last.calls:
            fail(f"{last.path}.tool_calls", "calls", "text; a finished call cannot be continued")
        if self._request.tool_choice.is_forced:
            fail("tool_choice", "a forced call", "'auto' when a message is continued")
        return last

    def _extra_message(self) -> Message | None:
        """The request's tools and response format, as a system message without text."""
        has_format = response_schema(self._request.response_format, self._dialect) is not None
        if not self._tools and not has_format:
            return None
        return Message("system", "tools", tools=self._tools)

    def _declared(self) -> tuple[Tool, ...]:
        tools = tuple(tool for turn in self._turns for tool in turn.message.tools)
        check_unique(tools)
        return tools

    def _find_last_user(self) -> None:
        places = [place for place, turn in enumerate(self._turns) if turn.is_user_like]
        self._last_user = places[-1] if places else -1

    def _drop_developers(self) -> None:
        """As the publisher's encoder does; at a server no developer turn is left by now."""
        if self._request.thinking and not self._keep:
            self._turns = [
                turn
                for place, turn in enumerate(self._turns)
                if turn.kind != "developer" or place >= self._last_user
            ]
            self._find_last_user()

    def _write_start(self) -> None:
        if self._request.add_bos:
            self._out.special(texts.BOS)
        effort = ""
        if self._request.thinking:
            effort = self._effort_text()
        opens_with_system = bool(self._turns) and self._turns[0].kind == "system"
        if self._dialect.is_v41 and (effort or opens_with_system):
            self._out.special(texts.SYSTEM)
        self._out.plain(effort)

    def _effort_text(self) -> str:
        effort = self._request.effort
        if effort is None and not self._request.at_server and not self._dialect.is_v41:
            return ""
        return self._dialect.effort_text(effort)

    def _write_turn(self, place: int, turn: Turn) -> None:
        if turn.kind == "assistant":
            self._write_assistant(place, turn)
        elif turn.kind == "user":
            self._out.special(texts.USER)
            self._write_blocks(turn)
        elif turn.kind == "latest_reminder":
            self._out.special(texts.LATEST_REMINDER)
            self._write_pieces(turn.message.content)
        else:
            if turn.kind == "developer":
                self._out.special(texts.USER)
            elif turn.is_late_system:
                self._out.special(texts.SYSTEM)
            self._write_pieces(turn.message.content)
            self._write_declarations(place, turn)
        self._write_task(place, turn)

    def _write_pieces(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                self._out.plain(piece)
            elif self._dialect.is_v41:
                self._out.special(texts.IMAGE_V41)
            else:
                self._out.plain(texts.UNSUPPORTED_IMAGE)

    def _write_blocks(self, turn: Turn) -> None:
        for place, block in enumerate(turn.blocks):
            if place:
                self._out.plain("\n\n")
            if block.is_result:
                self._out.plain(texts.TOOL_RESULT_OPEN)
            self._write_pieces(block.content)
            if block.is_result:
                self._out.plain(texts.TOOL_RESULT_CLOSE)

    def _write_declarations(self, place: int, turn: Turn) -> None:
        message = turn.message
        if message.tools:
            write_tools(self._out, message.tools, added=turn.is_late_system)
        if message.response_format is not None:
            self._write_format(texts.RESPONSE_FORMAT, message.response_format)
        elif place == 0 and turn.kind == "system":
            found = response_schema(self._request.response_format, self._dialect)
            if found is not None:
                self._write_format(*found)

    def _write_format(self, text: str, schema: Any) -> None:
        before, _, after = text.partition("{schema}")
        self._out.plain("\n\n" + before)
        if schema is not None:
            self._out.plain(jsontext.dump(schema) + after)

    def _write_assistant(self, place: int, turn: Turn) -> None:
        message = turn.message
        continued = message is self._continued
        after_task = place > 0 and self._turns[place - 1].task is not None
        if not after_task:
            self._out.special(texts.ASSISTANT)
            self._write_opening(place, message, continued=continued)
        self._out.assistant_text(self._assistant_content(message))
        if message.calls:
            write_calls(self._out, message.calls)
        if not continued:
            self._out.special(texts.EOS)

    def _write_opening(self, place: int, message: Message, *, continued: bool) -> None:
        thinks = self._request.thinking and (self._keep or place > self._last_user or continued)
        if not thinks:
            self._out.special(texts.THINK_CLOSE)
            return
        self._out.special(texts.THINK_OPEN)
        self._out.assistant_text(message.reasoning)
        if not continued or any(message.content):
            self._out.special(texts.THINK_CLOSE)

    def _assistant_content(self, message: Message) -> str:
        return "".join(
            piece if isinstance(piece, str) else texts.UNSUPPORTED_IMAGE
            for piece in message.content
        )

    def _write_task(self, place: int, turn: Turn) -> None:
        followers = self._turns[place + 1 : place + 2]
        if turn.task is None or (followers and followers[0].kind != "assistant"):
            return
        if turn.task == "action":
            self._out.special(texts.ASSISTANT)
            self._out.special(self._think_marker())
        self._out.special(texts.TASKS[turn.task])

    def _think_marker(self) -> str:
        return texts.THINK_OPEN if self._request.thinking else texts.THINK_CLOSE

    def _write_end(self) -> Start:
        """Open the assistant's turn, unless the prompt already ends inside one."""
        if self._continued is not None:
            return self._continued_start(self._continued)
        last = self._turns[-1] if self._turns else None
        if last is not None and last.task is not None:
            return Start("answer")
        if not (self._request.at_server or (last is not None and last.is_user_like)):
            return Start("answer")
        self._out.special(texts.ASSISTANT)
        self._out.special(self._think_marker())
        if self._request.thinking:
            return Start("reasoning")
        if self._request.tool_choice.is_forced:
            self._out.plain("\n\n<")
            self._out.special(texts.DSML)
            self._out.plain(f"{self._dialect.block_tag}>\n")
            return Start("block")
        return Start("answer")

    def _continued_start(self, message: Message) -> Start:
        if any(message.content):
            return Start("answer", continued=True)
        if self._request.thinking:
            return Start("reasoning", continued=bool(message.reasoning))
        return Start("answer")
