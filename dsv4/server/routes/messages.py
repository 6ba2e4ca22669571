"""POST /v1/messages and /v1/messages/count_tokens: the Anthropic protocol."""

import secrets
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from dsv4.chat import Delta, Parsed, jsontext
from dsv4.chat.requests import read_messages_api
from dsv4.server.answers import Answers, Choice
from dsv4.server.api_error import ApiError
from dsv4.server.generation import GenerationPlan, plan_chat, read_budget, refuse_images
from dsv4.server.json_route import make_router
from dsv4.server.metrics import RequestRecord
from dsv4.server.schemas import CountBody, MessagesBody
from dsv4.server.service import Service, in_thread
from dsv4.server.sse import EventStream, event, while_connected

router = make_router()

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_PING = event({"type": "ping"}, "ping")


@router.post("/messages")
async def messages(request: Request, body: MessagesBody) -> Response:
    service: Service = request.app.state.service
    _refuse_thread(body)
    name = service.accept(body)
    fields = await request.json()
    plan = await in_thread(lambda: _plan(service, body, fields))
    record = RequestRecord(request.state.request_id, "/v1/messages", name)
    answers = Answers(service, plan, record)
    await while_connected(request, answers.start())
    writer = _MessagesWriter(answers)
    if body.stream:
        return EventStream(writer.stream(), {})
    await while_connected(request, answers.finish())
    return JSONResponse(writer.whole())


@router.post("/messages/count_tokens")
async def count_tokens(request: Request, body: CountBody) -> dict[str, int]:
    service: Service = request.app.state.service
    _refuse_thread(body)
    service.link.check_loaded()
    service.model_name(body.model)
    fields = await request.json()

    def count() -> int:
        conversation = refuse_images(read_messages_api(fields, service.dialect))
        return len(service.prompt_ids(conversation.encode(service.dialect)))

    return {"input_tokens": await in_thread(count)}


def _refuse_thread(body: CountBody) -> None:
    """Refuse threads, which send only new messages; the details tell the client to send all."""
    if (body.model_extra or {}).get("thread") not in (None, False):
        raise ApiError(
            400,
            "thread: not supported here, nothing is stored; send the whole conversation in "
            "'messages' and no 'thread'",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )


def _plan(service: Service, body: MessagesBody, fields: dict[str, Any]) -> GenerationPlan:
    choice = body.tool_choice or {}
    return plan_chat(
        service,
        read_messages_api(fields, service.dialect),
        body,
        asked=body.max_tokens,
        is_lowered=True,
        budget=read_budget(fields),
        stops=tuple(body.stop_sequences or ()),
        parallel_calls=choice.get("disable_parallel_tool_use") is not True,
    )


class _MessagesWriter:
    """Writes an answer as content blocks, whole or as events."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._choice: Choice = answers.choices[0]
        self._index = -1  # of the block in progress
        self._kind: str | None = None
        self._base = {
            "id": f"msg_{answers.record.id}",
            "type": "message",
            "role": "assistant",
            "model": answers.record.model,
        }

    # --- whole --------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        result = self._choice.result
        content: list[dict[str, Any]] = []
        if result.reasoning:
            content.append(
                {"type": "thinking", "thinking": result.reasoning, "signature": _signature()}
            )
        if result.content or not (result.reasoning or result.tool_calls):
            content.append({"type": "text", "text": result.content})
        for place, call in enumerate(result.tool_calls):
            content.append(
                {
                    "type": "tool_use",
                    "id": self._choice.call_id(place),
                    "name": call.name,
                    "input": _input(call.arguments),
                }
            )
        return {**self._base, "content": content, **_end(result), "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        num_cached = self._choice.num_cached
        return {
            "input_tokens": self._answers.record.num_prompt - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._choice.num_output,
        }

    # --- as events ----------------------------------------------------------------------------

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun = {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield _event("message_start", message={**self._base, "content": [], **begun})
        try:
            async for updates in self._answers.updates():
                if not updates:
                    yield _PING
                for update in updates:
                    for delta in update.deltas:
                        for data in self._write(delta):
                            yield data
            for data in self._close():
                yield data
            end = _end(self._choice.result)
            yield _event("message_delta", delta=end, usage=self._usage())
            yield _event("message_stop")
        except ApiError as error:
            yield event(error.body("/v1/messages"), "error")

    def _write(self, delta: Delta) -> list[bytes]:
        if delta.kind == "reasoning":
            return self._text("thinking", delta.text)
        if delta.kind == "content":
            return self._text("text", delta.text)
        if delta.kind == "call":
            start = {"type": "tool_use", "id": self._choice.call_id(delta.call_index), "input": {}}
            return self._open("tool_use", {**start, "name": delta.text})
        return [self._delta("input_json_delta", partial_json=delta.text)]

    def _text(self, kind: str, text: str) -> list[bytes]:
        extra = {"signature": ""} if kind == "thinking" else {}
        opened = [] if kind == self._kind else self._open(kind, {"type": kind, kind: "", **extra})
        return [*opened, self._delta(f"{kind}_delta", **{kind: text})]

    def _open(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        closed = self._close()
        self._index += 1
        self._kind = kind
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        signed = []
        if self._kind == "thinking":
            signed = [self._delta("signature_delta", signature=_signature())]
        self._kind = None
        return [*signed, _event("content_block_stop", index=self._index)]

    def _delta(self, kind: str, **fields: str) -> bytes:
        delta = {"type": kind, **fields}
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _end(result: Parsed) -> dict[str, Any]:
    reason = _STOP_REASONS[result.finish_reason]
    if result.stop_sequence is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": result.stop_sequence}


def _signature() -> str:
    """Clients require a signature and send it back; the server ignores it."""
    return secrets.token_hex(16)


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; for a call cut by the length limit, what was complete."""
    try:
        value = jsontext.load(arguments)
    except ValueError:
        return {"incomplete": arguments}
    return value if isinstance(value, dict) else {"value": value}
