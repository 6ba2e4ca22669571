"""The journey of a token. READ FIRST.

    text  --chat.Tokenizer-->  token ids  --Engine.add-->  a Sequence that waits
    Engine.step:
        scheduler.next_step    which sequences run, with how many new tokens
        runner.step            pages are taken, model and ops turn tokens into logits
        sampling.sample_batch  logits become one token per sequence
        Engine._accept         the token joins its sequence; text comes out; ends are noticed

`stream` and `generate` are loops around `step`. A server uses `add`, `step` and `abort` alone.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4.chat.dialect import Dialect, choose_dialect
from dsv4.chat.encode import encode_prompt
from dsv4.chat.output.stops import StopMatcher
from dsv4.chat.tokenizer import Detokenizer, Tokenizer
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import Dsv4Error, RequestError
from dsv4.request import (
    Completion,
    FinishReason,
    Output,
    Request,
    SamplingParams,
    Stats,
    TokenLogprobs,
    join_outputs,
)
from dsv4.runner.load import Loaded, Progress, load_model
from dsv4.runner.runner import Chunk, Runner
from dsv4.sampling import Draw, sample_batch
from dsv4.scheduler import Scheduler, Work
from dsv4.scheduler import Sequence as Running

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]


@dataclass
class _Text:
    """How a sequence's tokens become text: whole characters, nothing of a stop string."""

    detokenizer: Detokenizer | None
    stops: StopMatcher
    stop_ids: frozenset[int] = field(default_factory=frozenset)


class Engine:
    def __init__(self, loaded: Loaded, tokenizer: Tokenizer | None, dialect: Dialect) -> None:
        self.config: ModelConfig = loaded.model.config
        self.settings = loaded.settings
        self.tokenizer = tokenizer
        self.dialect = dialect
        self._runner = Runner(loaded.model, loaded.settings)
        self._scheduler = Scheduler(self._runner.pages, loaded.settings.chunk_tokens)
        self._live: dict[str, tuple[Running, _Text]] = {}
        self._held: list[Output] = []  # brought by a step whose caller asked for other requests
        self._num_named = 0
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0
        self._last_step_s = 0.0
        self._num_finished: Counter[str] = Counter()

    @classmethod
    def load(
        cls, model: str | Path = "tiny", *, progress: Progress | None = None, **choices: Any
    ) -> "Engine":
        """`model`: a folder or an embedded model's name; `choices`: fields of EngineConfig."""
        loaded = load_model(str(model), EngineConfig.make(**choices), progress)
        has_tokenizer = (loaded.folder / "tokenizer.json").is_file()
        tokenizer = Tokenizer.from_folder(loaded.folder) if has_tokenizer else None
        has_system = tokenizer is not None and tokenizer.special.system is not None
        dialect = choose_dialect(has_system_marker=has_system, folder=loaded.folder)
        return cls(loaded, tokenizer, dialect)

    # --- one level down: what a server uses ---------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; a RequestError leaves everything else untouched."""
        self._check(request)
        params = request.params
        seed = params.seed if params.seed is not None else random.getrandbits(62)
        sequence = Running(request, seed)
        detokenizer = self.tokenizer.detokenizer() if self.tokenizer else None
        stop_ids = params.stop_ids
        ends = self.stop_ids if stop_ids is None else frozenset(stop_ids)
        self._live[request.id] = (sequence, _Text(detokenizer, StopMatcher(params.stop), ends))
        self._num_prompt_tokens += len(request.prompt_ids)
        self._scheduler.add(sequence)

    def step(self) -> list[Output]:
        """Run one step of everything that can run; what it brought, request by request."""
        begin = time.perf_counter()
        outputs = self._run_step()
        self._num_steps += 1
        self._last_step_s = time.perf_counter() - begin
        held, self._held = self._held, []
        return held + outputs

    def _run_step(self) -> list[Output]:
        work = self._scheduler.next_step()
        if not work:
            return []
        try:
            logits = self._runner.step([_chunk(item) for item in work])
            sampled = [item for item in work if item.samples]
            results = sample_batch(logits, [_draw(item.sequence) for item in sampled])
        except Exception as error:  # the step's requests end with the reason; the engine goes on
            log.error("a step failed: %s", error, exc_info=log.isEnabledFor(logging.DEBUG))
            return [self._fail(item.sequence, error) for item in work]
        return [
            self._accept(item.sequence, result)
            for item, result in zip(sampled, results, strict=True)
        ]

    def abort(self, request_id: str) -> Output:
        """End a request now. Unknown or finished ids are a RequestError."""
        if request_id not in self._live:
            raise RequestError(f"no running request has the id {request_id!r}")
        return self._finish(self._live[request_id][0], (), "", "abort")

    @property
    def num_unfinished(self) -> int:
        """Requests about which `step` will still have something to say."""
        return len(self._live.keys() | {output.request_id for output in self._held})

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless a request says otherwise."""
        own = {self.config.eos_id}
        return frozenset(own | self.tokenizer.stop_ids(self.dialect) if self.tokenizer else own)

    def stats(self) -> Stats:
        pages = self._runner.pages
        total = {str(pool): a.num_pages for pool, a in pages.allocators.items()}
        free = {str(pool): a.num_free for pool, a in pages.allocators.items()}
        return Stats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_unfinished - self._scheduler.num_waiting,
            pages_total=total,
            pages_used={pool: total[pool] - free[pool] for pool in total},
            pages_cached=dict.fromkeys(total, 0),
            num_prefix_asked=0,
            num_prefix_hit=0,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=0,
            num_steps=self._num_steps,
            last_step_s=self._last_step_s,
            num_finished=dict(self._num_finished),
        )

    def check_integrity(self) -> None:
        self._runner.pages.check_integrity()

    # --- whole answers ------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Output]:
        """The answer piece by piece; closing the iterator aborts the request."""
        request = self._request(prompt, params)
        self.add(request)
        yield from self._outputs_of({request.id})

    def generate(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """A list of prompts in, a list of answers out, computed as one batch."""
        if isinstance(prompts, str):
            prompts = [prompts]
        requests = [self._request(prompt, params) for prompt in prompts]
        outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
        for request in requests:
            self._check(request)  # all or none
        for request in requests:
            self.add(request)
        for output in self._outputs_of(outputs.keys()):
            outputs[output.request_id].append(output)
        return [join_outputs(request, outputs[request.id]) for request in requests]

    def _outputs_of(self, ids: Collection[str]) -> Iterator[Output]:
        """Step until these requests have ended; outputs of others wait for whoever asks next.

        Whoever stops listening early ends them: nothing runs on unheard.
        """
        try:
            while any(name in self._live for name in ids) or any(
                output.request_id in ids for output in self._held
            ):
                outputs = self.step()
                self._held = [output for output in outputs if output.request_id not in ids]
                yield from (output for output in outputs if output.request_id in ids)
        finally:
            for name in ids:
                if name in self._live:
                    self.abort(name)
            self._held = [output for output in self._held if output.request_id not in ids]

    def score(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Teacher-forced logits fp32 `[tokens, vocabulary]`, chunk by chunk."""
        self._check_prompt(tuple(token_ids), self.settings.max_context)
        pages = self._runner.pages.open()
        try:
            size = self.settings.chunk_tokens
            for start in range(0, len(token_ids), size):
                part = list(token_ids[start : start + size])
                yield self._runner.step([Chunk(pages, part, len(part))])
        finally:
            self._runner.pages.close(pages)

    # --- the steps in between -----------------------------------------------------------------

    def encode(self, text: str, mode: str = "chat") -> list[int]:
        """A text as token ids: a user's message (`chat`, `thinking`), or as it is (`raw`)."""
        if self.tokenizer is None:
            raise RequestError(
                "this checkpoint has no tokenizer.json, so a text prompt cannot be read; "
                "give token ids, or put the model's tokenizer.json into its folder"
            )
        if mode == "raw":
            return self.tokenizer.encode_with_specials(text)
        messages = [{"role": "user", "content": text}]
        return encode_prompt(messages, dialect=self.dialect, mode=mode).ids(self.tokenizer)

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        if not isinstance(prompt, Sequence):
            raise RequestError(f"a prompt is {prompt!r}, expected a text or a list of token ids")
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        self._num_named += 1
        return Request(f"request-{self._num_named}", tuple(ids), params or SamplingParams())

    def _check(self, request: Request) -> None:
        if request.id in self._live:
            raise RequestError(f"the request id {request.id!r} is in use")
        # one place of the context is for the first token of the answer
        self._check_prompt(request.prompt_ids, self.settings.max_context - 1)
        if request.params.guide is not None:
            raise RequestError("guided output is not built in yet; leave out the guide")
        last = self.config.vocab_size - 1
        for name, tokens in (
            ("logit_bias", request.params.logit_bias),
            ("stop_ids", request.params.stop_ids or ()),
        ):
            for token in tokens:
                if token > last:
                    raise RequestError(f"{name} names token {token}, the last id is {last}")

    def _check_prompt(self, ids: tuple[int, ...], limit: int) -> None:
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        vocab_size = self.config.vocab_size
        for place, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RequestError(
                    f"token {place} of the prompt is {token!r}, expected an id from 0 to "
                    f"{vocab_size - 1}"
                )
        if len(ids) > limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, expected at most {limit} in a context of "
                f"{self.settings.max_context}; shorten the prompt or raise max_context"
            )

    def _accept(self, sequence: Running, result: TokenLogprobs) -> Output:
        """A sampled token joins its sequence; the output says what is new."""
        request, text = sequence.request, self._live[sequence.request.id][1]
        sequence.token_ids.append(result.token_id)
        self._num_output_tokens += 1
        logprobs = (result,) if request.params.logprobs is not None else ()
        new = (result.token_id,)
        if result.token_id in text.stop_ids:
            return self._finish(sequence, new, "", "stop", result.token_id, logprobs)
        piece = text.detokenizer.push(result.token_id) if text.detokenizer else ""
        shown, stop = text.stops.push(piece)
        if stop is not None:
            text.detokenizer = None  # what follows a stop string is not shown
            return self._finish(sequence, new, shown, "stop", stop, logprobs)
        full = len(sequence.token_ids) >= self.settings.max_context
        if full or len(sequence.output_ids) >= request.params.max_tokens:
            return self._finish(sequence, new, shown, "length", None, logprobs)
        num_cached = 0 if len(sequence.output_ids) == 1 else None
        return Output(request.id, new, shown, logprobs=logprobs, num_cached=num_cached)

    def _finish(
        self,
        sequence: Running,
        token_ids: tuple[int, ...],
        shown: str,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: str | None = None,
    ) -> Output:
        _, text = self._live.pop(sequence.request.id)
        self._scheduler.remove(sequence)
        if text.detokenizer is not None:
            tail, stop = text.stops.push(text.detokenizer.finish())
            shown += tail
            if stop is None:
                shown += text.stops.finish()
        self._num_finished[reason] += 1
        return Output(
            sequence.request.id,
            token_ids,
            shown,
            reason,
            stop_reason,
            logprobs,
            error,
            num_cached=0,
        )

    def _fail(self, sequence: Running, error: Exception) -> Output:
        reason = str(error) if isinstance(error, Dsv4Error) else f"internal error: {error}"
        return self._finish(sequence, (), "", "error", error=reason)


def _chunk(work: Work) -> Chunk:
    sequence = work.sequence
    assert sequence.pages is not None
    start = sequence.num_computed
    new = sequence.token_ids[start : start + work.num_new]
    return Chunk(sequence.pages, new, 1 if work.samples else 0)


def _draw(sequence: Running) -> Draw:
    request = sequence.request
    return Draw(request.params, sequence.seed, request.prompt_ids, sequence.output_ids)
