"""The body of a /v1/chat/completions request."""

from collections.abc import Mapping
from typing import Any

from dsv4.chat.dialect import Dialect
from dsv4.chat.encode import Conversation, read_tool_choice
from dsv4.chat.fields import fail, read_flag, read_object
from dsv4.chat.messages import read_messages, read_tools
from dsv4.chat.requests.thinking import decide, read_effort, read_switch


def read_chat_completions(body: object, dialect: Dialect) -> Conversation:
    """Messages, tools and options; sampling fields are the server's."""
    fields = read_object(body, "body")
    effort = read_effort(fields.get("reasoning_effort"), "reasoning_effort", dialect)
    return Conversation(
        messages=read_messages(fields.get("messages")),
        tools=read_tools(fields.get("tools"), "tools", as_received=False),
        tool_choice=read_tool_choice(fields.get("tool_choice")),
        response_format=fields.get("response_format"),
        continue_final=read_flag(fields.get("continue_final_message"), "continue_final_message"),
        **decide(_switch(fields), effort),
    )


def _switch(fields: Mapping[str, Any]) -> bool | None:
    """`thinking`, or the switch that clients of other engines put into template arguments."""
    switch = read_switch(fields.get("thinking"), "thinking")
    if switch is not None:
        return switch
    arguments = fields.get("chat_template_kwargs")
    if arguments is None:
        return None
    for name, value in read_object(arguments, "chat_template_kwargs").items():
        path = f"chat_template_kwargs.{name}"
        if name not in ("thinking", "enable_thinking"):
            fail(path, "an unknown argument", "thinking or enable_thinking; there is no template")
        if value is not None:
            switch = read_flag(value, path)
    return switch
