"""The body of a /v1/chat/completions request."""

from collections.abc import Mapping
from typing import Any

from dsv4.chat.dialect import Dialect
from dsv4.chat.encode import Conversation
from dsv4.chat.fields import fail, read_flag, read_object
from dsv4.chat.messages import read_messages, read_tools
from dsv4.chat.requests.thinking import decide, read_effort, read_switch
from dsv4.chat.tool_choice import read_tool_choice


def read_chat_completions(body: object, dialect: Dialect) -> Conversation:
    """Messages, tools and options; the server reads sampling fields."""
    fields = read_object(body, "body")
    arguments = _template_arguments(fields.get("chat_template_kwargs"))
    switch = read_switch(fields.get("thinking"), "thinking")
    effort = read_effort(fields.get("reasoning_effort"), "reasoning_effort", dialect)
    if effort is None:
        path = "chat_template_kwargs.reasoning_effort"
        effort = read_effort(arguments.get("reasoning_effort"), path, dialect)
    return Conversation(
        messages=read_messages(fields.get("messages")),
        tools=read_tools(fields.get("tools"), "tools", as_received=False),
        tool_choice=read_tool_choice(fields.get("tool_choice")),
        response_format=fields.get("response_format"),
        continue_final=read_flag(fields.get("continue_final_message"), "continue_final_message"),
        drop_thinking=arguments.get("drop_thinking") is not False,
        **decide(arguments.get("thinking") if switch is None else switch, effort),
    )


def _template_arguments(value: object) -> Mapping[str, Any]:
    """Template arguments that clients of other engines send; there is no template here."""
    found: dict[str, Any] = {}
    for name, argument in read_object(
        {} if value is None else value, "chat_template_kwargs"
    ).items():
        path = f"chat_template_kwargs.{name}"
        if name not in ("thinking", "enable_thinking", "drop_thinking", "reasoning_effort"):
            fail(path, "an unknown argument", "thinking, drop_thinking or reasoning_effort")
        if argument is None:
            continue
        if name != "reasoning_effort":
            argument = read_flag(argument, path)
        found["thinking" if name == "enable_thinking" else name] = argument
    return found
