"""Answers in progress: engine outputs become reasoning, text and calls, piece by piece.

The three message protocols share this; they differ only in how they serialise answers.
"""

import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from dsv4.chat import Delta, OutputParser, Parsed, Tokenizer, new_call_id
from dsv4.request import Output, Request, TokenLogprobs
from dsv4.server.api_error import ApiError, internal_error
from dsv4.server.generation import GenerationPlan, Phase
from dsv4.server.metrics import RequestRecord
from dsv4.server.options import KEEP_ALIVE_SECONDS
from dsv4.server.service import Service

log = logging.getLogger(__name__)


@dataclass
class ChoiceUpdate:
    """New output of one choice."""

    choice: int
    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reasoning_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_last: bool = False


class Choice:
    """One answer: its phases, its parser, its counts."""

    def __init__(
        self, plan: GenerationPlan, index: int, record: RequestRecord, tokenizer: Tokenizer
    ) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        is_guided = any(phase.guide and phase.guide.must_come for phase in plan.phases)
        self._parser: OutputParser = plan.prompt.parser(
            tokenizer, stop=plan.stops, keeps_newlines=is_guided
        )
        self._ids: list[int] = []  # sampled and forced
        self._phase = 0
        self._record = record
        self._forced_deltas: list[Delta] = []
        self._call_ids: list[str] = []
        self.index = index
        self.num_output = self.num_drafted = self.num_accepted = 0
        self.total_logprob = 0.0  # of its tokens, if log-probabilities were requested
        self.num_reasoning = 0
        self.num_cached = 0
        self.is_finished = False
        self.logprobs = ChoiceUpdate(index)  # of all updates, if the answer is collected
        self._forced_deltas += self._force(self._current.forced)

    @property
    def _current(self) -> Phase:
        return self._plan.phases[self._phase]

    @property
    def request_id(self) -> str:
        return f"{self._record.key}-{self.index}-{self._phase}"

    @property
    def ids(self) -> list[int]:
        return self._ids

    @property
    def result(self) -> Parsed:
        result = self._parser.result
        if self._plan.parallel_calls or len(result.tool_calls) < 2:
            return result
        return replace(result, tool_calls=result.tool_calls[:1], finish_reason="tool_calls")

    def call_id(self, place: int) -> str:
        while len(self._call_ids) <= place:
            self._call_ids.append(new_call_id(len(self._call_ids)))
        return self._call_ids[place]

    def request(self) -> Request:
        """The engine request for the current phase."""
        plan, phase = self._plan, self._current
        params = plan.params
        left = params.max_tokens - self.num_output
        seed = later_seed(params.seed, self.index)
        max_tokens = left if phase.limit is None else min(left, phase.limit)
        stop_ids: tuple[int, ...] | None = () if plan.ignores_end else None
        if phase.until is not None:
            stop_ids = (*(() if plan.ignores_end else self._ends), phase.until)
        params = replace(
            params,
            max_tokens=max_tokens,
            min_tokens=min(max(params.min_tokens - self.num_output, 0), max_tokens),
            seed=seed,
            guide=phase.guide,
            stop_ids=stop_ids,
        )
        return Request(
            id=self.request_id,
            prompt_ids=plan.prompt_ids + tuple(self._ids),
            params=params,
            priority=plan.priority,
            cache_salt=plan.cache_salt,
        )

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(sorted(self._tokenizer.stop_ids(self._plan.prompt.dialect)))

    def consume(self, output: Output) -> ChoiceUpdate:
        """Parse new tokens. The choice then continues, enters its next phase, or is finished."""
        update = ChoiceUpdate(self.index, self._forced_deltas)
        self._forced_deltas = []
        if output.num_cached is not None and self._phase == 0:
            self.num_cached = output.num_cached
        tokens = output.token_ids[:-1] if self._drops_end(output) else output.token_ids
        self.num_output += len(output.token_ids)
        self.num_drafted += output.num_drafted
        self.num_accepted += output.num_accepted
        for place, token in enumerate(tokens):
            logprobs = output.logprobs[place] if output.logprobs else None
            self.total_logprob += logprobs.logprob if logprobs else 0.0
            self._push(token, logprobs, update)
        update.deltas = _joined(update.deltas)
        if self._must_end(update):
            self._finish(update, "stop")
        elif output.finished:
            self._end_phase(output, update)
        return update

    def _drops_end(self, output: Output) -> bool:
        """Whether an end marker ends only the phase, because something must still follow."""
        if output.finish_reason != "stop":
            return False
        return self._is_promised_next and output.stop_reason != self._current.until

    def _push(self, token: int, logprobs: TokenLogprobs | None, update: ChoiceUpdate) -> None:
        if self._parser.ended:
            return
        self._ids.append(token)
        if self._plan.ignores_end and token in self._ends:
            return
        part = self._parser.part
        update.deltas += self._parser.push_tokens((token,))
        if self._tokenizer.is_marker(token):
            return
        is_reasoning = part == self._parser.part == "reasoning"
        self.num_reasoning += is_reasoning
        if logprobs is not None and is_reasoning:
            update.reasoning_logprobs.append(logprobs)
        elif logprobs is not None and self._parser.part == "answer":
            update.logprobs.append(logprobs)

    def _must_end(self, update: ChoiceUpdate) -> bool:
        """Whether the model generated a stop string, or a second call where only one is allowed."""
        if not self._plan.parallel_calls:
            kept = [delta for delta in update.deltas if delta.call_index == 0]
            if len(kept) < len(update.deltas):
                update.deltas = kept
                return True
        return self._parser.ended and self._parser.stop_sequence is not None

    def _end_phase(self, output: Output, update: ChoiceUpdate) -> None:
        """The engine finished a phase: start the next one, or end the answer."""
        if output.finish_reason in ("error", "abort"):
            raise failure(output, self._record.id)
        has_next = self._phase + 1 < len(self._plan.phases)
        is_full = self.num_output >= self._plan.params.max_tokens
        phase = self._current
        reached = output.finish_reason == "length" or output.stop_reason == phase.until
        goes_on = has_next and not is_full and (reached or self._is_promised_next)
        if not goes_on:
            self._finish(update, "length" if output.finish_reason == "length" else "stop")
            return
        if phase.until is not None and output.stop_reason != phase.until:
            update.deltas += self._force((phase.until,))
        self._phase += 1
        update.deltas += self._force(self._current.forced)

    @property
    def _is_promised_next(self) -> bool:
        """Whether a call or a guided answer must follow even if the model ends."""
        following = self._plan.phases[self._phase + 1 : self._phase + 2]
        if not following or self._parser.part == "done":  # calls were already generated
            return False
        guide = following[0].guide
        return bool(following[0].forced) or (guide is not None and guide.must_come)

    def _force(self, tokens: tuple[int, ...]) -> list[Delta]:
        self._ids += tokens
        return self._parser.push_tokens(tokens)

    def _finish(self, update: ChoiceUpdate, reason: str) -> None:
        update.deltas += self._parser.finish("length" if reason == "length" else "stop")
        if not self._plan.parallel_calls:
            update.deltas = [delta for delta in update.deltas if delta.call_index == 0]
        update.is_last = self.is_finished = True


class Answers:
    """All choices of one request. Closing it, or exhausting `updates`, stops all its work."""

    def __init__(self, service: Service, plan: GenerationPlan, record: RequestRecord) -> None:
        self._service = service
        self._plan = plan
        self._box = service.link.open()
        self._is_closed = False
        self.record = record
        self.choices = [
            Choice(plan, index, record, service.tokenizer) for index in range(plan.num_choices)
        ]
        record.num_prompt = len(plan.prompt_ids)

    async def start(self) -> None:
        """Submit all choices to the engine; raises if it refuses."""
        try:
            for choice in self.choices:
                await self._box.add(choice.request())
        except BaseException as error:
            self.record.finish = "refused" if isinstance(error, ApiError) else "abort"
            self.close()
            raise

    async def updates(self) -> AsyncGenerator[list[ChoiceUpdate], None]:
        """New output by choice; an empty list if nothing arrives for a while."""
        try:
            while not all(choice.is_finished for choice in self.choices):
                outputs = await self._box.next(KEEP_ALIVE_SECONDS)
                updates = [await self._route_output(output) for output in outputs]
                if not outputs or any(updates):
                    yield [update for update in updates if update is not None]
            self.record.finish = self.choices[0].result.finish_reason
        except ApiError:
            self.record.finish = "error"
            raise
        finally:
            self.close()

    async def finish(self) -> None:
        async for updates in self.updates():
            for update in updates:
                found = self.choices[update.choice].logprobs
                found.logprobs += update.logprobs
                found.reasoning_logprobs += update.reasoning_logprobs

    def best(self, count: int) -> list[Choice]:
        """The choices with the highest mean token log-probability, renumbered."""
        if count < len(self.choices):
            places = sorted(
                range(len(self.choices)),
                key=lambda i: -self.choices[i].total_logprob / max(self.choices[i].num_output, 1),
            )
            found = [self.choices[place] for place in sorted(places[:count])]
            for index, choice in enumerate(found):
                choice.index = index
            return found
        return self.choices

    async def _route_output(self, output: Output) -> ChoiceUpdate | None:
        _, index, _ = output.request_id.rsplit("-", 2)
        choice = self.choices[int(index)]
        if choice.is_finished:
            return None  # it ran one more step before it was aborted
        self._service.metrics.count_tokens(self.record, len(output.token_ids))
        update = choice.consume(output)
        if update.is_last:
            self._box.abort(output.request_id)  # no effect if the engine ended it
        elif output.finished:
            await self._box.add(choice.request())
        return update

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._box.close()
        record = self.record
        record.num_cached = self.choices[0].num_cached
        record.num_reasoning = sum(choice.num_reasoning for choice in self.choices)
        for choice in self.choices:
            if choice.is_finished:
                result, count = choice.result, len(choice.result.tool_calls)
                record.num_calls += count
                record.num_malformed += result.malformed
                ids = [choice.call_id(place) for place in range(count)]
                self._service.reasoning_cache.keep(ids, result.reasoning)
        self._service.metrics.close(record)
        self._trace()

    def _trace(self) -> None:
        decode = self._service.tokenizer.decode
        if self._service.options.trace is not None:
            self._service.trace.write(
                {
                    "id": self.record.id,
                    "path": self.record.path,
                    "prompt": decode(self._plan.prompt_ids),
                    "outputs": [decode(choice.ids) for choice in self.choices],
                    "finish": self.record.finish,
                }
            )


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Merge consecutive texts of the same kind."""
    found: list[Delta] = []
    for delta in deltas:
        follows = found and found[-1]._replace(text="") == delta._replace(text="")
        if follows and delta.kind != "call":
            found[-1] = delta._replace(text=found[-1].text + delta.text)
        else:
            found.append(delta)
    return found


def later_seed(seed: int | None, place: int) -> int | None:
    """The seed of one of several choices; it stays a 64-bit number."""
    return None if seed is None else (seed + place + 2**63) % 2**64 - 2**63


def failure(output: Output, name: str) -> ApiError:
    """The error shown to the client of a failed request; details go to the log."""
    if output.refused:
        return ApiError(400, str(output.error))
    log.error("%s: the engine ended it (%s): %s", name, output.finish_reason, output.error)
    if output.finish_reason == "abort":
        return ApiError(503, f"the request was aborted: {output.error or 'no reason given'}")
    return internal_error(name, output.error_code, output.error)
