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
from collections.abc import Iterator, Sequence
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
        self._num_named = 0

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
        self._scheduler.add(sequence)

    def step(self) -> list[Output]:
        """Run one step of everything that can run; what it brought, request by request."""
        work = self._scheduler.next_step()
        if not work:
            return []
        try:
            logits = self._runner.step([_chunk(item) for item in work])
            sampled = [item for item in work if item.samples]
            results = sample_batch(logits, [_draw(item.sequence) for item in sampled])
        except Exception as error:  # the step's requests end with the reason; the engine goes on
            log.exception("a step failed")
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
        return self._scheduler.num_unfinished

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless a request says otherwise."""
        own = {self.config.eos_id}
        return frozenset(own | self.tokenizer.stop_ids(self.dialect) if self.tokenizer else own)

    def check_integrity(self) -> None:
        self._runner.pages.check_integrity()

    # --- whole answers ------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Output]:
        """The answer piece by piece; closing the iterator aborts the request."""
        request = self._request(prompt, params)
        self.add(request)
        try:
            while request.id in self._live:
                yield from (out for out in self.step() if out.request_id == request.id)
        finally:
            if request.id in self._live:
                self.abort(request.id)

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
        while any(request.id in self._live for request in requests):
            for output in self.step():
                if output.request_id in outputs:
                    outputs[output.request_id].append(output)
        return [join_outputs(request, outputs[request.id]) for request in requests]

    def score(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Teacher-forced logits fp32 `[tokens, vocabulary]`, chunk by chunk."""
        self._check(Request("score", tuple(token_ids), SamplingParams(max_tokens=1)), added=0)
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
        if isinstance(prompt, str):
            prompt = self.encode(prompt)
        self._num_named += 1
        name = f"request-{self._num_named}"
        return Request(name, tuple(prompt), params or SamplingParams())

    def _check(self, request: Request, added: int = 1) -> None:
        ids, limit = request.prompt_ids, self.settings.max_context
        if request.id in self._live:
            raise RequestError(f"the request id {request.id!r} is in use")
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        vocab_size = self.config.vocab_size
        for place, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RequestError(
                    f"token {place} of the prompt is {token!r}, expected an id from 0 to "
                    f"{vocab_size - 1}"
                )
        if len(ids) + added > limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the context holds {limit} with the answer; "
                "shorten the prompt or raise max_context"
            )
        for name, tokens in (
            ("logit_bias", request.params.logit_bias),
            ("stop_ids", request.params.stop_ids or ()),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name} names token {token}, the last id is {vocab_size - 1}"
                    )

    def _accept(self, sequence: Running, result: TokenLogprobs) -> Output:
        """A sampled token joins its sequence; the output says what is new."""
        request, text = sequence.request, self._live[sequence.request.id][1]
        sequence.token_ids.append(result.token_id)
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
        return Output(request.id, new, shown, logprobs=logprobs)

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
        return Output(sequence.request.id, token_ids, shown, reason, stop_reason, logprobs, error)

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
