"""Which tools may, or must, be called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4.chat.fields import fail, read_list, read_object, read_text, show
from dsv4.chat.messages import MAX_TOOLS


@dataclass(frozen=True)
class ToolChoice:
    """`kind` is auto, none, required or named. All tools are shown unless one is named; with
    `allowed` only some may be called."""

    kind: str = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    @property
    def is_forced(self) -> bool:
        return self.kind in ("required", "named")

    def allows(self, name: str) -> bool:
        return self.name in (None, name) and (self.allowed is None or name in self.allowed)


def read_tool_choice(value: object) -> ToolChoice:
    """Tool choice in the shape of chat completions; null is auto."""
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            fail("tool_choice", show(value), "auto, none, required or a named function")
        return ToolChoice(value)
    fields = read_object(value, "tool_choice")
    if fields.get("type") == "allowed_tools":
        path = "tool_choice.allowed_tools"
        entries = read_object(fields.get("allowed_tools"), path)
        return read_allowed_tools(entries, path, lambda item: item.get("function", {}).get("name"))
    name = read_object(fields.get("function"), "tool_choice.function").get("name")
    return ToolChoice("named", read_text(name, "tool_choice.function.name"))


def read_allowed_tools(
    fields: Mapping[str, Any], path: str, name_of: Callable[[Mapping[str, Any]], object]
) -> ToolChoice:
    mode = fields.get("mode")
    if mode not in ("auto", "required"):
        fail(f"{path}.mode", show(mode), "auto or required")
    entries = read_list(fields.get("tools"), f"{path}.tools", MAX_TOOLS)
    if not entries:
        fail(f"{path}.tools", "an empty list", "at least one tool; tool_choice 'none' allows none")
    names = []
    for place, entry in enumerate(entries):
        where = f"{path}.tools[{place}]"
        names.append(read_text(name_of(read_object(entry, where)), f"{where}.name"))
    return ToolChoice(str(mode), allowed=tuple(names))
