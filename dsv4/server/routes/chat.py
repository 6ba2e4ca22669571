"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import Request, Response

from dsv4.chat import Delta
from dsv4.chat.output.stops import read_stops
from dsv4.chat.requests import read_chat_completions
from dsv4.errors import RequestError
from dsv4.request import TokenLogprobs
from dsv4.server.answers import Answers, Choice, ChoiceUpdate
from dsv4.server.api_error import ApiError
from dsv4.server.generation import GenerationPlan, body_guide, plan_chat, read_budget
from dsv4.server.json_route import make_router
from dsv4.server.metrics import RequestRecord
from dsv4.server.schemas import ChatBody
from dsv4.server.service import FINGERPRINT, Service, in_thread, token_text
from dsv4.server.sse import DONE, KEEP_ALIVE, EventStream, event, while_connected, whole_answer

router = make_router()

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


@router.post("/chat/completions")
async def chat_completions(request: Request, body: ChatBody) -> Response:
    service: Service = request.app.state.service
    body.check_streaming()
    name = service.accept(body, body.num_choices)
    fields = await request.json()
    plan = await in_thread(lambda: _plan(service, body, fields))
    record = RequestRecord(request.state.request_id, "/v1/chat/completions", name)
    answers = Answers(service, plan, record)
    writer = _ChatWriter(service, body, answers)
    if body.stream:
        await while_connected(request, answers.start())
        return EventStream(writer.stream(), {})
    num_prompt = len(plan.prompt_ids) if body.prompt_logprobs is not None else 0
    num_logprobs = num_prompt * (1 + (body.prompt_logprobs or 0)) + plan.num_logprobs
    with service.hold_logprobs(num_logprobs):
        await while_connected(request, answers.start())
        await while_connected(request, answers.finish())
        if body.prompt_logprobs is not None:
            scoring = prompt_logprobs(service, record, plan.prompt_ids, body.prompt_logprobs)
            writer.prompt_logprobs = await while_connected(request, scoring)
        return await whole_answer(writer.whole, writer.num_entries)


def _plan(service: Service, body: ChatBody, fields: dict[str, Any]) -> GenerationPlan:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs: found it without logprobs, expected logprobs: true")
    return plan_chat(
        service,
        read_chat_completions(fields, service.dialect),
        body,
        asked=body.max_completion_tokens or body.max_tokens,
        budget=read_budget(fields),
        guide=body_guide(body),
        stops=read_stops(body.stop),
        logprobs=_num_logprobs(body),
        num_choices=body.num_choices,
        parallel_calls=body.parallel_tool_calls is not False,
        is_whole=not body.stream,
    )


def _num_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    return 0 if body.num_choices > (body.n or 1) else None  # needed to rank the choices


class _ChatWriter:
    """Writes chat completions, whole or in chunks."""

    def __init__(self, service: Service, body: ChatBody, answers: Answers) -> None:
        self._tokenizer = service.tokenizer
        self._answers = answers
        self._num_choices = body.n or 1
        self.prompt_logprobs: PromptLogprobs | None = None
        self._shows_reasoning = body.include_reasoning is not False
        self._has_logprobs = bool(body.logprobs)
        self._num_top = body.top_logprobs or 0
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._base = {
            "id": f"chatcmpl-{answers.record.id}",
            "created": int(time.time()),
            "model": answers.record.model,
            "system_fingerprint": FINGERPRINT,
        }

    # --- whole --------------------------------------------------------------------------------

    @property
    def num_entries(self) -> int:
        num_tokens = sum(choice.num_output for choice in self._answers.choices)
        count = num_tokens * (1 + self._num_top) if self._has_logprobs else 0
        return count + sum(len(item or ()) for item in self.prompt_logprobs or ())

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in self._answers.best(self._num_choices)]
        scored = self.prompt_logprobs
        return {
            **self._base,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(self._answers),
            **({} if scored is None else {"prompt_logprobs": scored}),
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        result = choice.result
        message: dict[str, Any] = {"role": "assistant", "content": result.content}
        if result.reasoning and self._shows_reasoning:
            message["reasoning_content"] = message["reasoning"] = result.reasoning
        if result.tool_calls:
            message["content"] = result.content or None
            message["tool_calls"] = [
                {
                    "id": choice.call_id(place),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for place, call in enumerate(result.tool_calls)
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self._has_logprobs else None,
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_sequence,
        }

    # --- in chunks ----------------------------------------------------------------------------

    async def stream(self) -> AsyncGenerator[bytes, None]:
        try:
            for choice in self._answers.choices:
                yield self._chunk(choice.index, {"role": "assistant", "content": ""})
            async for updates in self._answers.updates():
                if not updates:
                    yield KEEP_ALIVE
                for update in updates:
                    for data in self._chunks(update):
                        yield data
            if self._has_usage:
                last = {**self._base, "object": "chat.completion.chunk", "choices": []}
                yield event({**last, "usage": usage(self._answers)})
        except ApiError as error:
            yield event(error.body("/v1/chat/completions"))
        yield DONE

    def _chunks(self, update: ChoiceUpdate) -> list[bytes]:
        logprobs = self._logprobs(update) if self._has_logprobs else None
        found = []
        for delta in update.deltas:
            content = self._delta(delta, self._answers.choices[update.choice])
            if content is not None:
                found.append(self._chunk(update.choice, content, logprobs))
                logprobs = None
        if logprobs is not None and (update.logprobs or update.reasoning_logprobs):
            found.append(self._chunk(update.choice, {}, logprobs))  # its text is buffered for now
        if update.is_last:
            result = self._answers.choices[update.choice].result
            extra = {"stop_reason": result.stop_sequence}
            found.append(self._chunk(update.choice, {}, None, result.finish_reason, extra))
        return found

    def _delta(self, delta: Delta, choice: Choice) -> dict[str, Any] | None:
        if delta.kind == "content":
            return {"content": delta.text}
        if delta.kind == "reasoning":
            if not self._shows_reasoning:
                return None
            return {"reasoning_content": delta.text, "reasoning": delta.text}
        call: dict[str, Any] = {"index": delta.call_index}
        if delta.kind == "call":
            call["id"] = choice.call_id(delta.call_index)
            call["type"] = "function"
            call["function"] = {"name": delta.text, "arguments": ""}
        else:
            call["function"] = {"arguments": delta.text}
        return {"tool_calls": [call]}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **(extra or {}),
        }
        chunk = {**self._base, "object": "chat.completion.chunk", "choices": [choice]}
        if self._has_usage:
            chunk["usage"] = None
        return event(chunk)

    # --- logprobs -----------------------------------------------------------------------------

    def _logprobs(self, update: ChoiceUpdate) -> dict[str, Any]:
        found: dict[str, Any] = {"content": self._entries(update.logprobs), "refusal": None}
        if self._shows_reasoning and update.reasoning_logprobs:
            found["reasoning_content"] = self._entries(update.reasoning_logprobs)
        return found

    def _entries(self, items: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            {
                **self._entry(item.token_id, item.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in item.top],
            }
            for item in items
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {
            "token": token_text(data),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(data),
        }


PromptLogprobs = list[dict[str, dict[str, Any]] | None]


async def prompt_logprobs(
    service: Service, record: RequestRecord, ids: Sequence[int], top: int
) -> PromptLogprobs:
    """Log-probabilities of each prompt token by its id; none for the first."""
    found: PromptLogprobs = [None]
    for item in await service.link.score(f"{record.key}-0-prompt", ids, top):
        ranks: dict[int, int] = {token: rank for rank, (token, _) in enumerate(item.top, 1)}
        values = {item.token_id: item.logprob, **dict(item.top)}
        found.append(
            {
                str(token): {
                    "logprob": max(value, LEAST_LOGPROB),
                    "rank": ranks.get(token),
                    "decoded_token": service.token_name(token),
                }
                for token, value in values.items()
            }
        )
    return found


def draft_usage(num_drafted: int, num_accepted: int) -> dict[str, int]:
    """Drafts that became tokens of the answer, and drafts that were rejected."""
    return {
        "accepted_prediction_tokens": num_accepted,
        "rejected_prediction_tokens": num_drafted - num_accepted,
    }


def usage(answers: Answers) -> dict[str, Any]:
    choices = answers.choices
    num_prompt, num_cached = answers.record.num_prompt, choices[0].num_cached
    num_output = sum(choice.num_output for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.num_reasoning for choice in choices),
            **draft_usage(
                sum(choice.num_drafted for choice in choices),
                sum(choice.num_accepted for choice in choices),
            ),
        },
        "prompt_cache_hit_tokens": num_cached,
        "prompt_cache_miss_tokens": num_prompt - num_cached,
    }
