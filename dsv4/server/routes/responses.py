"""POST /v1/responses: the newer OpenAI protocol, without storage."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from dsv4.chat import Delta
from dsv4.chat.requests import read_responses
from dsv4.errors import RequestError
from dsv4.server.answers import Answers, Choice
from dsv4.server.api_error import ApiError
from dsv4.server.generation import GenerationPlan, plan_chat
from dsv4.server.json_route import make_router
from dsv4.server.metrics import RequestRecord
from dsv4.server.schemas import ResponsesBody
from dsv4.server.service import Service, in_thread
from dsv4.server.sse import KEEP_ALIVE, EventStream, event, while_connected

router = make_router()

ResponseItem = dict[str, Any]


@router.post("/responses")
async def responses(request: Request, body: ResponsesBody) -> Response:
    service: Service = request.app.state.service
    name = service.accept(body)
    fields = await request.json()
    plan = await in_thread(lambda: _plan(service, body, fields))
    record = RequestRecord(request.state.request_id, "/v1/responses", name)
    answers = Answers(service, plan, record)
    await while_connected(request, answers.start())
    writer = _ResponsesWriter(fields, plan, answers)
    if body.stream:
        return EventStream(writer.stream(), {})
    await while_connected(request, writer.collect())
    return JSONResponse(writer.response(writer.status))


def _plan(service: Service, body: ResponsesBody, fields: dict[str, Any]) -> GenerationPlan:
    for name in body.include or []:
        if "logprobs" in name:
            raise RequestError(f"include: found {name[:80]!r}, expected none of log-probabilities")
    return plan_chat(
        service,
        read_responses(fields, service.dialect),
        body,
        asked=body.max_output_tokens,
        parallel_calls=body.parallel_tool_calls is not False,
    )


class _ResponsesWriter:
    """Writes an answer as items. Whole answers and event streams share the same steps."""

    def __init__(self, fields: dict[str, Any], plan: GenerationPlan, answers: Answers) -> None:
        self._fields = fields
        self._tools = {tool.name: tool for tool in plan.prompt.tools}
        self._answers = answers
        self._choice: Choice = answers.choices[0]
        self._items: list[ResponseItem] = []
        self._open: ResponseItem | None = None
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._num_events = 0
        self._id = answers.record.id
        self._created = int(time.time())

    @property
    def status(self) -> str:
        is_cut = self._choice.result.finish_reason == "length"
        return "incomplete" if is_cut else "completed"

    async def collect(self) -> None:
        async for updates in self._answers.updates():
            for update in updates:
                for delta in update.deltas:
                    self.take(delta)
        self.close()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        yield self._write("response.created", response=self.response("in_progress"))
        yield self._write("response.in_progress", response=self.response("in_progress"))
        try:
            async for updates in self._answers.updates():
                if not updates:
                    yield KEEP_ALIVE
                for update in updates:
                    for delta in update.deltas:
                        self.take(delta)
                    for data in self._take_events():
                        yield data
            self.close()
            for data in self._take_events():
                yield data
            yield self._write(f"response.{self.status}", response=self.response(self.status))
        except ApiError as error:
            failed = self.response("failed")
            failed["error"] = {"code": error.code or "server_error", "message": error.message}
            yield self._write("response.failed", response=failed)

    def _take_events(self) -> list[bytes]:
        events, self._events = self._events, []
        return [self._write(kind, **fields) for kind, fields in events]

    def _write(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    # --- items --------------------------------------------------------------------------------

    def take(self, delta: Delta) -> None:
        if delta.kind == "call":
            self._start(self._call_item(delta))
            return
        kinds = {"reasoning": "reasoning", "content": "message", "arguments": "function_call"}
        if self._open is None or self._open["type"] != kinds[delta.kind]:
            self._start(self._text_item(delta.kind))
        item = self._open
        assert item is not None
        if delta.kind == "arguments":
            item["arguments"] += delta.text
            self._say("function_call_arguments.delta", delta=delta.text)
        else:
            item["content"][0]["text"] += delta.text
            self._say(f"{_part_word(item)}.delta", delta=delta.text, **_part_extra(item))

    def _text_item(self, kind: str) -> ResponseItem:
        number = len(self._items)
        if kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            return {
                "id": f"rs_{self._id}_{number}",
                "type": "reasoning",
                "summary": [],
                "content": [part],
            }
        text: ResponseItem = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {
            "id": f"msg_{self._id}_{number}",
            "type": "message",
            "role": "assistant",
            "content": [text],
        }

    def _call_item(self, delta: Delta) -> ResponseItem:
        item: ResponseItem = {
            "id": f"fc_{self._id}_{len(self._items)}",
            "type": "function_call",
            "call_id": self._choice.call_id(delta.call_index),
            "name": delta.text,
            "arguments": "",
        }
        tool = self._tools.get(delta.text)
        if tool is not None and tool.namespace is not None:
            item["name"], item["namespace"] = tool.local_name, tool.namespace
        return item

    def _start(self, item: ResponseItem) -> None:
        self.close()
        item["status"] = "in_progress"
        self._items.append(item)
        self._open = item
        shown = {**item, "content": []} if "content" in item else dict(item)
        self._say("output_item.added", item=shown, has_id=False)
        if "content" in item:
            self._say("content_part.added", part=dict(item["content"][0]))

    def close(self) -> None:
        """Close the item in progress: completed, or incomplete if the length limit cut it."""
        item = self._open
        if item is None:
            return
        is_cut = self._choice.is_finished and self.status == "incomplete"
        item["status"] = "incomplete" if is_cut else "completed"
        if "content" in item:
            part = dict(item["content"][0])
            self._say(f"{_part_word(item)}.done", text=part["text"], **_part_extra(item))
            self._say("content_part.done", part=part)
        else:
            name, arguments = item["name"], item["arguments"]
            self._say("function_call_arguments.done", name=name, arguments=arguments)
        self._say("output_item.done", item=dict(item), has_id=False)
        self._open = None

    def _say(self, kind: str, *, has_id: bool = True, **fields: Any) -> None:
        """An event about the item in progress."""
        item = self._items[-1]
        if has_id:
            fields["item_id"] = item["id"]
        if has_id and "content" in item:
            fields["content_index"] = 0
        fields["output_index"] = len(self._items) - 1
        self._events.append((f"response.{kind}", fields))

    # --- the whole ----------------------------------------------------------------------------

    def response(self, status: str) -> dict[str, Any]:
        fields = self._fields
        is_over = status in ("completed", "incomplete")
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": fields.get("instructions"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "model": self._answers.record.model,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": fields.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": fields.get("temperature", 1.0),
            "text": fields.get("text") or {"format": {"type": "text"}},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "top_p": fields.get("top_p", 1.0),
            "truncation": "disabled",
            "metadata": fields.get("metadata") or {},
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> dict[str, Any]:
        choice, num_prompt = self._choice, self._answers.record.num_prompt
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": choice.num_cached},
            "output_tokens": choice.num_output,
            "output_tokens_details": {"reasoning_tokens": choice.num_reasoning},
            "total_tokens": num_prompt + choice.num_output,
        }


def _part_word(item: ResponseItem) -> str:
    return "reasoning_text" if item["type"] == "reasoning" else "output_text"


def _part_extra(item: ResponseItem) -> dict[str, Any]:
    return {"logprobs": []} if item["type"] == "message" else {}
