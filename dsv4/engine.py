"""The journey of a token. READ FIRST. Long because it covers the whole journey.

    text  --chat.Tokenizer-->  token ids  --Engine.add-->  a waiting SequenceState
    Engine.step:
        Pipeline.advance       one step; on a GPU the next one is already submitted:
            scheduler.next_step    which sequences run, with how many new tokens
                                   (pages, cached prefixes, priorities, preemption)
            runner.submit          allocate pages; model and ops turn tokens into logits
            runner.sample            sample one token per sequence
            runner.read            copy the tokens back to the host
        Engine._accept         append the token, detokenise, check stop conditions

`stream` and `generate` are loops around `step`. A server uses only `add`, `step` and `abort`.
"""

import contextlib
import functools
import itertools
import logging
import math
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

import torch

from dsv4.cache.geometry import POOLS
from dsv4.chat.dialect import Dialect, choose_dialect
from dsv4.chat.encode import encode_prompt
from dsv4.chat.output.answer import AnswerText
from dsv4.chat.tokenizer import Tokenizer
from dsv4.config import EngineConfig, EngineOptions, ModelConfig
from dsv4.errors import CapacityError, Dsv4Error, RankError, RequestError
from dsv4.pipeline import Failure, Pipeline
from dsv4.request import (
    Completion,
    FinishReason,
    Output,
    Request,
    SamplingParams,
    Stats,
    TokenLogprobs,
    check_prompt,
    check_request,
    join_outputs,
)
from dsv4.runner.load import LoadedModel, Model, disk_store
from dsv4.runner.ranks.start import load_ranks
from dsv4.runner.runner import Chunk, Runner
from dsv4.sampling import NO_TEXT, Guides, Matcher, MinTokens, PendingGuide, SamplingRow
from dsv4.scheduler import Audit, AuditedAnswer, Drafting, ScheduledTokens, Scheduler, SequenceState
from dsv4.scheduler.drafters import Given, Lookup
from dsv4.scheduler.home import open_homes
from dsv4.util.astream import AsyncStreams
from dsv4.util.events import Event, Listener
from dsv4.util.progress import Progress

log = logging.getLogger(__name__)

PromptInput = str | Sequence[int]
MAX_ANSWERS = 128  # per prompt


@dataclass
class _LiveRequest:
    """A request in the engine."""

    sequence: SequenceState
    text: AnswerText
    sampling_row: SamplingRow  # sampling parameters, without the guide's mask
    expires: float  # on the monotonic clock
    compiling: PendingGuide | None = None  # its guide; scheduled once that is ready
    matcher: Matcher | MinTokens | None = None
    failure: Exception | None = None  # raised while preparing its next token
    audits: AuditedAnswer | None = None  # the answer it recomputes; its outputs are dropped


class Engine:
    """A loaded model and everything that answers requests with it; `Engine.load` makes one."""

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer | None,
        dialect: Dialect,
        warm_up_progress: Progress | None = None,
    ) -> None:
        self.config: ModelConfig = loaded.model.config
        self.settings = loaded.settings
        self.tokenizer = tokenizer
        self.dialect = dialect
        self.listeners: list[Listener] = []  # receive every event; see `dsv4/util/events.py`
        self._runner = Runner(
            loaded.model, loaded.settings, warm_up_progress, loaded.team, loaded.draft,
            loaded.swapper,
        )  # fmt: skip
        store = disk_store(loaded, self._runner.state) if loaded.settings.prefix_cache else None
        self._homes = open_homes(self._runner.homes, self._runner.copiers, store)
        self._prefixes = [home.prefix for home in self._homes if home.prefix is not None]
        most, make = loaded.settings.draft_tokens, Lookup if self._runner.drafter is None else Given
        sizes, room = (most, self.config.vocab_size), self._runner.buffers.numbers_of_drafts
        how = {"learns": loaded.settings.draft_auto, "peeks": make is Lookup}
        drafting = Drafting(*sizes, self._allowed_drafts, make, room, **how) if most else None
        self._drafting = drafting
        self._scheduler = Scheduler(
            self._homes, loaded.settings.home_share.chunk_tokens, self._emit_sequence,
            self._budget(), None if drafting is None else drafting.propose, self._runner.num_lanes,
        )  # fmt: skip
        self._pipeline = Pipeline(
            self._scheduler,
            self._runner,
            self._is_live,
            self._sampling_row,
            self._is_guided,
            drafting,
        )
        self._audit: Audit | None = None
        if loaded.settings.audit_share:
            choices = asdict(loaded.settings)
            self._audit = Audit(choices["audit_share"], choices["audit_folder"], choices)
        self._live: dict[str, _LiveRequest] = {}
        self._next_expiry = math.inf  # on the monotonic clock
        self._buffered: list[Output] = []  # outputs of requests the last caller did not ask for
        self._streams: AsyncStreams[Output] | None = None
        self._num_named = self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0
        self._last_step_s = 0.0
        self._num_finished: Counter[str] = Counter()

    @classmethod
    def load(
        cls,
        model: Model = "tiny",
        *,
        progress: Progress | None = None,
        warm_up_progress: Progress | None = None,
        rank_failed: Callable[[RankError], None] | None = None,
        **choices: Unpack[EngineOptions],
    ) -> "Engine":
        """`model`: a folder or an embedded model; `choices`: fields of EngineConfig. `progress`
        receives (bytes read, total), `warm_up_progress` (steps done, total), and `rank_failed`, on
        another thread and even while this waits, why no step can run any more."""
        loaded = load_ranks(model, EngineConfig.make(**choices), progress, rank_failed)
        has_tokenizer = (loaded.folder / "tokenizer.json").is_file()
        tokenizer = Tokenizer.from_folder(loaded.folder) if has_tokenizer else None
        has_system = tokenizer is not None and tokenizer.special.system is not None
        dialect = choose_dialect(has_system_marker=has_system, folder=loaded.folder)
        return cls(loaded, tokenizer, dialect, warm_up_progress)

    # --- one level down: the server's interface -----------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; a RequestError leaves everything else untouched."""
        self._check(request)
        seed = request.params.seed
        self._start(request, seed if seed is not None else random.getrandbits(62))
        self._num_prompt_tokens += len(request.prompt_ids)

    def _start(self, request: Request, seed: int, audits: AuditedAnswer | None = None) -> None:
        params = request.params
        sequence = SequenceState(request, seed, uses_prefix_cache=audits is None)
        sequence.may_draft = params.draft and audits is None
        known = len(request.prompt_ids) + params.max_tokens
        sequence.max_len = min(known, self.settings.max_context)
        ends = self.stop_ids if params.stop_ids is None else frozenset(params.stop_ids)
        text = AnswerText(self.tokenizer, params.stop, ends)
        deadline = math.inf if request.deadline is None else request.deadline
        row = SamplingRow(params, seed, sequence.token_ids, len(request.prompt_ids))
        live = _LiveRequest(sequence, text, row, time.monotonic() + deadline, audits=audits)
        if params.guide is not None:
            live.compiling = self._guides.compile(params.guide)
        elif params.min_tokens:
            live.matcher = self._min_tokens(None, params)
        self._live[request.id] = live
        self._next_expiry = min(self._next_expiry, live.expires)
        self._emit("added", request.id, num_prompt=len(request.prompt_ids))
        self._scheduler.rank(sequence)
        if live.compiling is None:
            self._scheduler.add(sequence)

    def step(self) -> list[Output]:
        """Run one step of everything that can run; returns the new outputs by request."""
        buffered, self._buffered = self._buffered, []
        lives = () if self._audit is None else self._live.items()
        audit_ids = {name for name, live in lives if live.audits is not None}
        outputs = self._expire() + self._begin_guided() + self._run_step()
        return buffered + [output for output in outputs if output.request_id not in audit_ids]

    def _run_step(self) -> list[Output]:
        outcome = self._pipeline.advance()
        outputs = [self._accept_or_fail(*pair) for pair in outcome.results]
        outputs += self._fail_all(outcome.failures)
        while (more := self._pipeline.next_round()) is not None:
            outputs += [self._accept_or_fail(*pair) for pair in more.results]
            outputs = Output.by_request(outputs + self._fail_all(more.failures))
        outputs += self._fail_all(self._pipeline.sample_ahead())
        if outcome.scheduled is not None:
            self._count_step(outcome.scheduled, [*outcome.clock, time.perf_counter()])
        return outputs

    def _fail_all(self, failures: list[Failure]) -> list[Output]:
        return [output for failure in failures for output in self._fail(*failure)]

    def _is_live(self, sequence: SequenceState) -> bool:
        live = self._live.get(sequence.request.id)
        return live is not None and live.sequence is sequence

    def _is_guided(self, sequence: SequenceState) -> bool:
        return self._live[sequence.request.id].matcher is not None

    def _allowed_drafts(self, sequence: SequenceState, drafts: list[int]) -> list[int]:
        matcher = self._live[sequence.request.id].matcher
        return drafts if matcher is None else matcher.allowed(drafts)

    def _budget(self) -> Callable[[int], int] | None:
        """Prompt tokens allowed in a step, given its decoding sequences and measured costs."""
        costs, most = self._runner.costs, self.settings.max_gap_ms
        if costs is None or not most:
            return None
        return lambda num_decoding: (
            costs.budget(num_decoding, most) if num_decoding else self.settings.chunk_tokens
        )

    def _expire(self) -> list[Output]:
        """Abort the requests whose deadline has passed."""
        if (now := time.monotonic()) < self._next_expiry:
            return []
        late = [live.sequence for live in self._live.values() if live.expires <= now]
        left = (live.expires for live in self._live.values() if live.expires > now)
        self._next_expiry = min(left, default=math.inf)
        return [
            self._finish(s, "abort", error=f"the deadline of {s.request.deadline:g} s has passed")
            for s in late
        ]

    def _begin_guided(self) -> list[Output]:
        """Schedule requests whose guide has compiled; fail those whose guide did not."""
        outputs = []
        for live in [live for live in self._live.values() if live.compiling is not None]:
            guide = live.sequence.request.params.guide
            assert guide is not None
            assert live.compiling is not None
            if self._scheduler.num_unfinished == 0:
                live.compiling.done.wait(0.02)  # idle otherwise
            if not live.compiling.is_ready:
                continue
            try:
                live.matcher = self._guides.matcher(live.compiling, guide)
                params = live.sequence.request.params
                if params.min_tokens:
                    live.matcher = self._min_tokens(live.matcher, params)
            except (RequestError, CapacityError) as error:
                end = self._finish(live.sequence, "error", error=str(error))
                outputs.append(replace(end, refused=isinstance(error, RequestError)))
                continue
            live.compiling = None
            self._scheduler.add(live.sequence)
        return outputs

    def _min_tokens(self, inner: Matcher | None, params: SamplingParams) -> MinTokens:
        return MinTokens(inner, self.stop_ids, params.min_tokens, self.config.vocab_size)

    def abort(self, request_id: str) -> Output:
        """End a request now. Unknown or finished ids are a RequestError."""
        if request_id not in self._live:
            raise RequestError(f"no running request has the id {request_id!r}")
        return self._finish(self._live[request_id].sequence, "abort")

    @functools.cached_property
    def _guides(self) -> Guides:
        assert self.tokenizer is not None
        tokens = range(min(self.config.vocab_size, self.tokenizer.vocab_size))
        is_marker, of = self.tokenizer.is_marker, self.tokenizer.token_bytes
        vocabulary = [b"" if is_marker(token) else of(token) for token in tokens]
        tag_marker = self.tokenizer.special.dsml
        if tag_marker is not None and tag_marker < len(vocabulary):
            vocabulary[tag_marker] = NO_TEXT  # a guide may name it by its id
        vocabulary += [b""] * (self.config.vocab_size - len(vocabulary))
        return Guides(vocabulary, sorted(self.stop_ids))

    @property
    def num_unfinished(self) -> int:
        """Requests with outputs still to come from `step`."""
        return len(self._live.keys() | {output.request_id for output in self._buffered})

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless a request says otherwise."""
        own = set(self.config.eos_ids)
        return frozenset(own | self.tokenizer.stop_ids(self.dialect) if self.tokenizer else own)

    def stats(self) -> Stats:
        """Current state, and counters since start."""
        team, audit = self._runner.team, self._audit
        pools = [home.pages.allocators for home in self._homes]
        return Stats(
            num_waiting=len(self._live) - self._scheduler.num_running,
            num_running=self._scheduler.num_running,
            pages_total={n: sum(by[n].num_pages for by in pools) for n in POOLS},
            pages_used={n: sum(by[n].num_used for by in pools) for n in POOLS},
            pages_cached={n: sum(by[n].num_idle for by in pools) for n in POOLS},
            num_prefix_asked=sum(prefix.num_asked for prefix in self._prefixes),
            num_prefix_hit=sum(prefix.num_hit for prefix in self._prefixes),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_surprises=self._runner.guard.num_surprises,
            num_steps=self._num_steps,
            last_step_s=self._last_step_s,
            num_finished=dict(self._num_finished),
            num_audited=audit.num_audited if audit else 0,
            num_differences=audit.num_differences if audit else 0,
            **({} if self._drafting is None else self._drafting.counts()),
            **self._runner.load_stats(),
            ranks=team.report() if team is not None else (),
        )

    def close(self) -> None:
        """Abort running requests and write the prefixes worth keeping to disk."""
        for request_id in list(self._live):
            self.abort(request_id)
        for prefix in self._prefixes:
            prefix.flush()
        if "_guides" in self.__dict__:  # created on first use
            self._guides.close()
        self._runner.close()

    def cached_prefixes(self) -> set[bytes]:
        """Keys of the prefixes in memory, for a router."""
        return set().union(*(prefix.keys() for prefix in self._prefixes))

    @property
    def failure(self) -> Dsv4Error | None:
        """Why no step can run any more: a rank has failed. Load the engine again."""
        return None if self._runner.team is None else self._runner.team.failure

    def check_integrity(self) -> None:
        """Raise if a page or slot is leaked or miscounted. For tests, and when idle."""
        for home in self._homes:
            (home.prefix or home.pages).check_integrity()

    # --- whole answers ------------------------------------------------------------------------

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> Iterator[Output]:
        """The answer piece by piece; closing the iterator aborts the request."""
        request = self._request(prompt, params)
        self.add(request)
        yield from self._outputs_of({request.id})

    async def astream(
        self, prompt: PromptInput, params: SamplingParams | None = None
    ) -> AsyncGenerator[Output, None]:
        """`stream` for asyncio: any number of streams per event loop; steps run on a thread."""
        if self._streams is None or not self._streams.is_current:
            self._streams = AsyncStreams(self._step_for, self.abort)
        request = self._request(prompt, params)
        stream = self._streams.stream(request.id, lambda: self.add(request))
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    def generate(
        self, prompts: str | Sequence[PromptInput], params: SamplingParams | None = None, n: int = 1
    ) -> list[Completion]:
        """Answer a list of prompts as one batch.

        The `n` answers to a prompt are adjacent; answer i uses seed + i if a seed is given.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if type(n) is not int or not 1 <= n <= MAX_ANSWERS:
            raise RequestError(f"n is {n!r}, expected a whole number from 1 to {MAX_ANSWERS}")
        params = params or SamplingParams()
        seeds = [None if params.seed is None else params.seed + i for i in range(n)]
        requests = [
            self._request(prompt, replace(params, seed=seed))
            for prompt in prompts
            for seed in seeds
        ]
        outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
        for request in requests:
            self._check(request)  # all or none
        for request in requests:
            self.add(request)
        for output in self._outputs_of(outputs.keys()):
            outputs[output.request_id].append(output)
        return [join_outputs(request, outputs[request.id]) for request in requests]

    def _outputs_of(self, ids: Collection[str]) -> Iterator[Output]:
        """Step until these requests end, buffering other outputs. Closing early aborts them."""
        try:
            while any(name in self._live for name in ids) or any(
                output.request_id in ids for output in self._buffered
            ):
                outputs = self._step_for(ids)
                if not outputs and self._scheduler.num_waiting and not self._scheduler.num_running:
                    outputs = self._fail_starved(ids)
                yield from outputs
        finally:
            for name in ids:
                if name in self._live:
                    self.abort(name)
            self._buffered = [output for output in self._buffered if output.request_id not in ids]

    def _fail_starved(self, ids: Collection[str]) -> list[Output]:
        """Nothing can run: the caller's own `score` iterator holds every slot."""
        error = CapacityError("no slot is free and none will be: `score` holds them all")
        return self._fail([self._live[name].sequence for name in ids if name in self._live], error)

    def _step_for(self, ids: Collection[str]) -> list[Output]:
        outputs = self.step()
        self._buffered = [output for output in outputs if output.request_id not in ids]
        return [output for output in outputs if output.request_id in ids]

    def score(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Teacher-forced fp32 logits `[tokens, vocabulary]`, chunk by chunk."""
        check_prompt(
            tuple(token_ids),
            self.config.vocab_size,
            self.settings.max_context,
            self.settings.max_context,
        )
        home = max(self._runner.homes, key=lambda home: home.num_free_slots)
        pages = home.open()
        try:
            size = min(home.geometry.chunk_tokens, self._runner.scored_tokens)
            for start in range(0, len(token_ids), size):
                part = list(token_ids[start : start + size])
                yield self._runner.step([Chunk(pages, part, len(part))])
        finally:
            home.close(pages)

    # --- the steps in between -----------------------------------------------------------------

    def encode(self, text: str, mode: str = "chat") -> list[int]:
        """Token ids of a text: as a user message (`chat`, `thinking`), or unchanged (`raw`)."""
        if self.tokenizer is None:
            raise RequestError(
                "this checkpoint has no tokenizer.json, so a text prompt cannot be read; "
                "give token ids, or put the model's tokenizer.json into its folder"
            )
        if mode == "raw":
            return self.tokenizer.encode_with_specials(text)
        messages = [{"role": "user", "content": text}]
        return encode_prompt(messages, dialect=self.dialect, mode=mode).ids(self.tokenizer)

    def _request(self, prompt: PromptInput, params: SamplingParams | None) -> Request:
        if not isinstance(prompt, Sequence):
            raise RequestError(f"a prompt is {prompt!r}, expected a text or a list of token ids")
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        self._num_named += 1
        return Request(f"request-{self._num_named}", tuple(ids), params or SamplingParams())

    def _check(self, request: Request) -> None:
        if request.id in self._live:
            raise RequestError(f"the request id {request.id!r} is in use")
        if request.params.guide is not None and self.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json, so no guide can be followed")
        check_request(request, self.config.vocab_size, self.settings.max_context)

    def _sampling_row(self, sequence: SequenceState) -> SamplingRow:
        live = self._live.get(sequence.request.id)
        if live is None or live.sequence is not sequence:  # ended: the token is dropped
            return SamplingRow(sequence.request.params, sequence.seed, sequence.token_ids, 0)
        if live.matcher is None:
            return live.sampling_row
        try:
            return replace(live.sampling_row, mask=live.matcher.mask())
        except Exception as error:  # fails this request only, at its next token
            live.failure = error
            return live.sampling_row

    def _accept_or_fail(self, sequence: SequenceState, result: TokenLogprobs) -> Output:
        """An error in one request's token ends only that request."""
        failure = self._live[sequence.request.id].failure
        try:
            if failure is not None:
                raise failure
            return self._accept(sequence, result)
        except Exception as error:
            if not self._is_live(sequence):
                raise
            return self._fail([sequence], error)[0]

    def _accept(self, sequence: SequenceState, result: TokenLogprobs) -> Output:
        """Append a sampled token to its sequence; returns the new output."""
        live, params = self._live[sequence.request.id], sequence.request.params
        if live.matcher is not None:
            token = live.matcher.replacement(result.token_id, live.text.stop_ids)
            if token != result.token_id:
                self._pipeline.discard_pending(sequence)
            result = replace(result, token_id=token)
        sequence.token_ids.append(result.token_id)
        if live.audits is None:
            self._num_output_tokens += 1
        if self._audit is not None:
            sequence.results.append(result)
        if live.matcher is not None:
            ended = live.matcher.accept(result.token_id)
            if live.matcher.is_stuck:
                error = "no token of the vocabulary continues the answer under its guide"
                return replace(self._finish(sequence, "error", error=error), refused=True)
            if ended:
                return self._finish(sequence, "stop", result.token_id, "", (result,))
        shown, stop = live.text.push(result.token_id)
        if stop is not None:
            return self._finish(sequence, "stop", stop, shown, (result,))
        if len(sequence.token_ids) >= sequence.max_len:
            return self._finish(sequence, "length", None, shown, (result,))
        num_cached = sequence.num_cached if sequence.num_output == 1 else None
        logprobs = (result,) if params.logprobs is not None else ()
        name = sequence.request.id
        return Output(name, (result.token_id,), shown, logprobs=logprobs, num_cached=num_cached)

    def _finish(
        self,
        sequence: SequenceState,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        shown: str = "",
        results: tuple[TokenLogprobs, ...] = (),
        error: str | None = None,
    ) -> Output:
        live = self._live.pop(sequence.request.id)
        if live.compiling is None:
            self._scheduler.remove(sequence)
        else:
            self._guides.give_up(live.compiling)
        shown += live.text.finish()
        self._num_finished[reason] += live.audits is None
        if self._audit is not None and reason in ("stop", "length"):
            self._audit_answer(self._audit, sequence, live)
        self._emit("finished", sequence.request.id, reason=reason, num_output=sequence.num_output)
        return _output(
            sequence,
            shown,
            results,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            num_cached=sequence.num_cached or 0,
            num_drafted=sequence.num_drafted,
            num_accepted=sequence.num_accepted,
        )

    def _audit_answer(self, audit: Audit, sequence: SequenceState, live: _LiveRequest) -> None:
        """Audit: rerun a finished request, or compare one that was rerun."""
        if live.audits is not None:
            audit.compare(live.audits, sequence)
        elif audit.wants(sequence.request.id):
            request, finding = audit.again(sequence)
            if request.id not in self._live:
                self._start(request, sequence.seed, finding)

    def _fail(self, sequences: Sequence[SequenceState], error: Exception) -> list[Output]:
        log.error("a step failed: %s", error, exc_info=log.isEnabledFor(logging.DEBUG))
        reason = str(error) if isinstance(error, Dsv4Error) else f"internal error: {error}"
        code = error.code if isinstance(error, Dsv4Error) else None
        live = filter(self._is_live, sequences)  # some may have ended in the step before
        ends = (self._finish(sequence, "error", error=reason) for sequence in live)
        return [replace(end, error_code=code) for end in ends]

    # --- events -------------------------------------------------------------------------------

    def _emit(self, kind: str, request_id: str | None = None, **values: Any) -> None:
        for listener in self.listeners:
            listener(Event(kind, time.perf_counter(), request_id, values))

    def _emit_sequence(self, kind: str, sequence: SequenceState) -> None:
        self._emit(kind, sequence.request.id, num_computed=sequence.num_computed)

    def _count_step(self, scheduled: list[ScheduledTokens], clock: list[float]) -> None:
        self._num_steps += 1
        self._last_step_s = clock[-1] - clock[0]
        if not self.listeners:
            return
        phases, stats = ("schedule", "run", "accept"), self.stats()
        spans = [b - a for a, b in itertools.pairwise(clock)]
        values = {
            "phases_s": dict(zip(phases, spans, strict=True)),
            "num_tokens": sum(item.num_new for item in scheduled),
            "num_sampled": sum(item.samples for item in scheduled),
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "pages_used": stats.pages_used,
        }
        for listener in self.listeners:
            listener(Event("step", clock[0], None, values))


def _output(
    sequence: SequenceState, shown: str, results: tuple[TokenLogprobs, ...], **end: Any
) -> Output:
    request = sequence.request
    tokens = tuple(result.token_id for result in results)
    logprobs = results if request.params.logprobs is not None else ()
    return Output(request.id, tokens, shown, logprobs=logprobs, **end)
