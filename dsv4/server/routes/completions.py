"""POST /v1/completions: raw prompts, without a template and without parsing."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request, Response

from dsv4.chat.output.stops import read_stops
from dsv4.chat.tokenizer import Detokenizer
from dsv4.request import Output, SamplingParams, TokenLogprobs
from dsv4.request import Request as EngineRequest
from dsv4.server.answers import failure, later_seed
from dsv4.server.api_error import ApiError
from dsv4.server.generation import body_guide, sampling_params
from dsv4.server.json_route import make_router
from dsv4.server.metrics import RequestRecord
from dsv4.server.options import KEEP_ALIVE_SECONDS
from dsv4.server.routes.chat import LEAST_LOGPROB, PromptLogprobs, draft_usage, prompt_logprobs
from dsv4.server.schemas import CompletionBody
from dsv4.server.service import FINGERPRINT, Service, in_thread
from dsv4.server.sse import DONE, KEEP_ALIVE, EventStream, event, while_connected, whole_answer

router = make_router()

DEFAULT_TOKENS = 16
MAX_ANSWERS = 128  # prompts times choices


@dataclass
class _Answer:
    """One choice: what is new since the last chunk, and the running totals."""

    index: int
    ids: tuple[int, ...]
    num_added: int  # leading tokens that the client did not send
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_first: bool = False  # includes an echoed prompt's first token, which has no log-probability
    prompt_logprobs: PromptLogprobs | None = None
    total_logprob: float = 0.0
    num_output: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached: int = 0
    finish: str | None = None
    stop: str | int | None = None
    detokenizer: Detokenizer | None = None  # counts the characters before each token
    num_characters: int = 0


@router.post("/completions")
async def completions(request: Request, body: CompletionBody) -> Response:
    service: Service = request.app.state.service
    body.check_streaming()
    count = body.num_choices
    num_prompts = len(body.prompt) if _is_list_of_prompts(body.prompt) else 1
    if num_prompts * count > MAX_ANSWERS:
        found = f"found {num_prompts} prompts with {count} choices each"
        raise ApiError(400, f"n: {found}, expected at most {MAX_ANSWERS} answers", param="n")
    name = service.accept(body, num_prompts * count)
    prompts = await in_thread(lambda: _prompts(service, body))
    longest = max(len(prompt.ids) for prompt in prompts)
    params = await in_thread(lambda: _params(service, body, longest))
    record = RequestRecord(request.state.request_id, "/v1/completions", name)
    run = _Run(service, body, prompts, params, record)
    with service.hold_logprobs(_held_logprobs(body, prompts, params)):
        await while_connected(request, run.start())
        if body.stream:
            return EventStream(run.stream(), {})
        await while_connected(request, run.finish())
        return await whole_answer(run.whole, run.num_entries)


def _held_logprobs(body: CompletionBody, prompts: "list[_Prompt]", params: SamplingParams) -> int:
    """Log-probabilities held at once, alternatives included; a stream holds only its prompts'."""
    num_prompt, count = sum(len(prompt.ids) for prompt in prompts), 0
    if body.prompt_logprobs is not None:
        count += num_prompt * (1 + body.prompt_logprobs)
    if body.logprobs is not None and body.echo:
        count += num_prompt * body.num_choices * (1 + body.logprobs)
    if params.logprobs is not None and not body.stream and body.max_tokens != 0:
        num_output = params.max_tokens * len(prompts) * body.num_choices
        count += num_output * (1 + params.logprobs)
    return count


def _is_list_of_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


@dataclass(frozen=True)
class _Prompt:
    ids: tuple[int, ...]
    num_added: int  # leading begin markers that the client did not send


def _prompts(service: Service, body: CompletionBody) -> list[_Prompt]:
    prompts: Any = body.prompt if _is_list_of_prompts(body.prompt) else [body.prompt]
    return [_read(service, prompt, body.add_special_tokens is not False) for prompt in prompts]


def _read(service: Service, prompt: str | Sequence[int], adds_bos: bool) -> _Prompt:
    """Text or ids. The model was trained with a begin marker, so a missing one is added."""
    if isinstance(prompt, str):
        service.check_length(len(prompt), "prompt")
        ids = tuple(service.tokenizer.encode_with_specials(prompt))
    else:
        service.limit_tokens(None, len(prompt), 1, path="prompt")
        service.check_ids(prompt, "prompt")
        ids = tuple(prompt)
    bos = int(service.link.facts["bos_id"])
    is_bare = not adds_bos or ids[:1] == (bos,) or prompt == []
    return _Prompt(ids, 0) if is_bare else _Prompt((bos, *ids), 1)


def _params(service: Service, body: CompletionBody, num_prompt: int) -> SamplingParams:
    asked = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_tokens is None:
        asked = max(min(asked, service.max_context - num_prompt), 1)
    limit = service.limit_tokens(asked or 1, num_prompt, DEFAULT_TOKENS, path="prompt")
    return replace(
        sampling_params(body, max_tokens=limit, logprobs=_num_logprobs(body)),
        stop=read_stops(body.stop),
        stop_ids=() if body.ignore_eos else None,
        guide=body_guide(body),
    )


def _num_logprobs(body: CompletionBody) -> int | None:
    picks = body.num_choices > (body.n or 1)  # best of several, by log-probability
    return 0 if body.logprobs is None and picks else body.logprobs


class _Run:
    """All answers of one request."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        prompts: list[_Prompt],
        params: SamplingParams,
        record: RequestRecord,
    ) -> None:
        self._service = service
        self._body = body
        self._params = params
        self._record = record
        self._box = service.link.open()
        self._count = count = body.num_choices
        self._answers = [
            _Answer(index, prompts[index // count].ids, prompts[index // count].num_added)
            for index in range(count * len(prompts))
        ]
        record.num_prompt = sum(len(prompt.ids) for prompt in prompts)
        self._base = {
            "id": f"cmpl-{record.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": record.model,
            "system_fingerprint": FINGERPRINT,
        }
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)

    async def start(self) -> None:
        try:
            for answer in self._answers:
                await self._begin(answer)
        except BaseException as error:
            finish = "refused" if isinstance(error, ApiError) else "abort"
            failed = isinstance(error, ApiError) and error.status_code == 500  # scoring a prompt
            self._close("error" if failed else finish)
            raise

    async def _begin(self, answer: _Answer) -> None:
        if not answer.ids:
            raise ApiError(400, "prompt: found an empty one, expected at least one token")
        if self._body.echo:
            await self._echo(answer)
        if self._body.prompt_logprobs is not None:
            top = self._body.prompt_logprobs
            scored = await prompt_logprobs(self._service, self._record, answer.ids, top)
            answer.prompt_logprobs = scored
        if self._body.max_tokens == 0:
            answer.finish = "length"
            return
        params, shift = self._params, answer.index % self._count
        params = replace(params, seed=later_seed(params.seed, shift))
        await self._box.add(
            EngineRequest(
                f"{self._record.key}-{answer.index}-0",
                answer.ids,
                params,
                priority=self._body.priority or 0,
                cache_salt=self._service.salt(self._body.cache_salt),
            )
        )

    async def _echo(self, answer: _Answer) -> None:
        """Return the prompt first, with the log-probabilities of its tokens."""
        skipped = answer.num_added
        if self._service.has_tokenizer:
            answer.text = self._service.tokenizer.decode(answer.ids[skipped:])
        if self._body.logprobs is not None:
            name = f"{self._record.key}-{answer.index}-echo"
            scores = await self._service.link.score(name, answer.ids, self._body.logprobs)
            answer.logprobs = [TokenLogprobs(answer.ids[0], 0.0), *scores][skipped:]
            answer.has_first = bool(answer.logprobs)

    async def _outputs(self) -> AsyncGenerator[list[_Answer], None]:
        """Answers with new output; an empty list if nothing arrives for a while."""
        finish = "error"
        try:
            yield [answer for answer in self._answers if answer.text or answer.finish]
            while not all(answer.finish for answer in self._answers):
                outputs = await self._box.next(KEEP_ALIVE_SECONDS)
                yield [self._consume(output) for output in outputs]
            finish = self._answers[0].finish or "stop"
        except (GeneratorExit, asyncio.CancelledError):  # the client has disconnected
            finish = "abort"
            raise
        finally:
            self._close(finish)

    def _consume(self, output: Output) -> _Answer:
        answer = self._answers[int(output.request_id.rsplit("-", 2)[1])]
        if output.finish_reason in ("error", "abort"):
            raise failure(output, self._record.id)
        self._service.metrics.count_tokens(self._record, len(output.token_ids))
        answer.text += output.text
        answer.logprobs += output.logprobs
        answer.total_logprob += sum(item.logprob for item in output.logprobs)
        answer.num_output += len(output.token_ids)
        answer.num_drafted += output.num_drafted
        answer.num_accepted += output.num_accepted
        answer.num_cached = max(answer.num_cached, output.num_cached or 0)
        answer.finish, answer.stop = output.finish_reason, output.stop_reason
        return answer

    def _close(self, finish: str) -> None:
        self._box.close()
        self._record.finish = finish
        self._record.num_cached = sum(answer.num_cached for answer in self._answers)
        self._service.metrics.close(self._record)

    # --- writing ------------------------------------------------------------------------------

    async def finish(self) -> None:
        async for _ in self._outputs():
            pass

    @property
    def num_entries(self) -> int:
        return sum(len(answer.logprobs) for answer in self._answers) * (
            1 + (self._body.logprobs or 0)
        )

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(answer) for answer in self._best()]
        for index, choice in enumerate(choices):
            choice["index"] = index
        return {**self._base, "choices": choices, "usage": self._usage()}

    def _best(self) -> list[_Answer]:
        """For each prompt, the answers with the highest mean token log-probability."""
        found, kept = [], self._body.n or 1
        for start in range(0, len(self._answers), self._count):
            group = self._answers[start : start + self._count]
            ranked = sorted(group, key=lambda a: -a.total_logprob / max(a.num_output, 1))
            found += sorted(ranked[:kept], key=lambda a: a.index)
        return found

    async def stream(self) -> AsyncGenerator[bytes, None]:
        extra: dict[str, Any] = {"usage": None} if self._has_usage else {}
        try:
            async for answers in self._outputs():
                if not answers:
                    yield KEEP_ALIVE
                for answer in answers:
                    yield event({**self._base, "choices": [self._choice(answer)], **extra})
                    answer.text, answer.logprobs, answer.has_first = "", [], False
            if self._has_usage:
                yield event({**self._base, "choices": [], "usage": self._usage()})
        except ApiError as error:
            yield event(error.body("/v1/completions"))
        yield DONE

    def _choice(self, answer: _Answer) -> dict[str, Any]:
        has_logprobs = self._body.logprobs is not None
        scored = answer.prompt_logprobs
        return {
            "index": answer.index,
            "text": answer.text,
            "logprobs": self._logprobs(answer) if has_logprobs else None,
            "finish_reason": answer.finish,
            "stop_reason": answer.stop if isinstance(answer.stop, str) else None,
            **({} if scored is None else {"prompt_logprobs": scored}),
        }

    def _logprobs(self, answer: _Answer) -> dict[str, Any]:
        name = self._service.token_name
        tokens = [name(item.token_id) for item in answer.logprobs]
        values: list[Any] = [max(item.logprob, LEAST_LOGPROB) for item in answer.logprobs]
        top: list[Any] = [
            {name(token): max(value, LEAST_LOGPROB) for token, value in item.top}
            for item in answer.logprobs
        ]
        if answer.has_first:
            values[0] = top[0] = None
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": [self._offset(answer, item.token_id) for item in answer.logprobs],
        }

    def _offset(self, answer: _Answer, token: int) -> int:
        """Text offset of the next token; a token inside a character has that character's offset."""
        if not self._service.has_tokenizer:
            return 0
        if answer.detokenizer is None:
            answer.detokenizer = self._service.tokenizer.detokenizer()
        place = answer.num_characters
        answer.num_characters += len(answer.detokenizer.push(token))
        return place

    def _usage(self) -> dict[str, Any]:
        num_prompt = self._record.num_prompt
        num_output = sum(answer.num_output for answer in self._answers)
        num_cached = sum(answer.num_cached for answer in self._answers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": draft_usage(
                sum(answer.num_drafted for answer in self._answers),
                sum(answer.num_accepted for answer in self._answers),
            ),
        }
