"""From messages to turns: the rules for the order of a prompt.

A turn is what one marker opens. Several messages may share a turn (a run of user messages and tool
results), and some move (V4 has only one system message, at the start).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dsv4.chat.dialect import Dialect
from dsv4.chat.fields import fail, show
from dsv4.chat.messages import Message, Piece, Tool, ToolCall


@dataclass
class ContentBlock:
    """One part of a user turn; `call_id` counts only for results."""

    content: tuple[Piece, ...]
    is_result: bool = False
    call_id: str | None = None


@dataclass
class Turn:
    """`message` carries what belongs to one message; `blocks` are used by user turns only."""

    kind: str  # system, developer, user, latest_reminder, assistant
    message: Message
    blocks: list[ContentBlock] = field(default_factory=list)
    task: str | None = None
    is_late_system: bool = False  # V4.1: a system message that is not the first turn

    @property
    def is_user_like(self) -> bool:
        return self.kind in ("user", "developer") or self.is_late_system


def build_turns(
    messages: Sequence[Message], dialect: Dialect, *, extra: Message | None = None
) -> list[Turn]:
    """`extra` holds the request's own tools and response format, or None if there are none."""
    ordered = _place_system(messages, dialect)
    if extra is not None:
        ordered = _attach(ordered, extra)
    if dialect.is_v41:
        ordered = _first_reminders(ordered)
    turns: list[Turn] = []
    for message in ordered:
        if message.role in ("user", "tool"):
            _add_to_user_turn(turns, message)
        else:
            turns.append(Turn(message.role, message, task=message.task))
    if dialect.is_v41:
        for turn in turns[1:]:
            turn.is_late_system = turn.kind == "system"
    _sort_results(turns)
    return turns


def check_results(messages: Iterable[Message]) -> None:
    """Every call must be answered once, before the next assistant turn; nothing else may be.

    A prompt that breaks this never occurred in training. Results may be mixed with user text.
    """
    open_calls: dict[str | None, Message] = {}
    answered: set[str | None] = set()
    for message in messages:
        if message.role == "tool":
            _check_result(message, open_calls, answered)
        elif message.role == "assistant":
            _check_all_answered(open_calls, answered)
            answered = set()
            open_calls = {call.id: message for call in message.calls}
            if None in open_calls:
                fail(f"{message.path}.tool_calls", "a call without an id", "an id for each call")
    _check_all_answered(open_calls, answered)


def _check_result(
    message: Message, open_calls: dict[str | None, Message], answered: set[str | None]
) -> None:
    path = f"{message.path}.tool_call_id"
    if message.call_id not in open_calls:
        known = ", ".join(show(call_id) for call_id in list(open_calls)[:4]) or "none"
        fail(
            path,
            show(message.call_id),
            f"the id of a call of the assistant message before it ({known})",
        )
    if message.call_id in answered:
        fail(path, f"a second result for {show(message.call_id)}", "one result for each call")
    answered.add(message.call_id)


def _check_all_answered(open_calls: dict[str | None, Message], answered: set[str | None]) -> None:
    for call_id, message in open_calls.items():
        if call_id not in answered:
            fail(
                f"{message.path}.tool_calls",
                f"no result for the call {show(call_id)}",
                "a tool message for each call before the next assistant message",
            )


def _place_system(messages: Sequence[Message], dialect: Dialect) -> list[Message]:
    kept = [m for m in messages if not (m.role == "system" and m.is_blank)]
    if dialect.is_v41:
        return kept
    # V4 has no system marker: a late system message would be glued to the text before it.
    system = [m for m in kept if m.role == "system"]
    others = [m for m in kept if m.role != "system"]
    if not system:
        return others
    content: list[Piece] = []
    tools: list[Tool] = []
    response_format = None
    for message in system:
        if any(message.content):
            content += ["\n\n"] if content else []
            content += message.content
        tools += message.tools
        if message.response_format is not None:
            response_format = message.response_format
    joined = replace(
        system[0], content=tuple(content), tools=tuple(tools), response_format=response_format
    )
    return [joined, *others]


def _attach(messages: list[Message], extra: Message) -> list[Message]:
    """Put the request's tools and response format on the first system message."""
    if not messages or messages[0].role != "system":
        return [extra, *messages]
    first = messages[0]
    merged = replace(
        first,
        tools=(*first.tools, *extra.tools),
        response_format=(
            first.response_format if extra.response_format is None else extra.response_format
        ),
    )
    return [merged, *messages[1:]]


def _first_reminders(messages: list[Message]) -> list[Message]:
    """V4.1 keeps the first of several reminders in a row."""
    return [
        message
        for place, message in enumerate(messages)
        if not (
            message.role == "latest_reminder"
            and place
            and messages[place - 1].role == "latest_reminder"
        )
    ]


def _add_to_user_turn(turns: list[Turn], message: Message) -> None:
    is_result = message.role == "tool"
    block = ContentBlock(message.content, is_result, message.call_id)
    last = turns[-1] if turns else None
    # A task closes its turn against later user text, but results may still join.
    if last is not None and last.kind == "user" and (is_result or last.task is None):
        last.blocks.append(block)
        last.task = last.task or message.task
    else:
        turns.append(Turn("user", message, [block], message.task))


def _sort_results(turns: list[Turn]) -> None:
    """Sort results in the order of their calls; text blocks keep their places."""
    calls: tuple[ToolCall, ...] = ()
    for turn in turns:
        if turn.message.calls:
            calls = turn.message.calls
        results = [block for block in turn.blocks if block.is_result]
        if len(results) < 2:
            continue
        order = {call.id: place for place, call in enumerate(calls) if call.id is not None}
        by_call = iter(sorted(results, key=lambda block: order.get(block.call_id or "", 0)))
        turn.blocks = [next(by_call) if block.is_result else block for block in turn.blocks]
