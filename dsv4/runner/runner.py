"""A step: scheduled work in, tokens out. Long because it is the whole life of a step.

Holds the model and its state; knows nothing of requests.

`submit` queues the model's part of a step, `sample` its sampling, `read` waits for the tokens. The
host need not wait in between: a step may be submitted before the previous tokens are known, since
they are already on the device. A sequence that has ended in the meantime writes only past its last
token, and reassigned pages are overwritten later by their new owners.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.geometry import POOLS
from dsv4.cache.pages import Growth, SequencePages, StatePages
from dsv4.cache.prefix import StateCopier
from dsv4.cache.state import StateTensors
from dsv4.errors import CapacityError, KernelError
from dsv4.model.draft import DraftModel
from dsv4.model.transformer import DraftTaps, Transformer
from dsv4.ops import engine_ops
from dsv4.parallel.team import Team
from dsv4.request import TokenLogprobs
from dsv4.runner.buffers import StepBuffers
from dsv4.runner.compile_guard import CompileGuard, numbered
from dsv4.runner.cost import StepCosts
from dsv4.runner.drafts.device import DeviceDrafter, PendingDrafts, device_drafter, draft_parts
from dsv4.runner.drafts.verify import Verify, samples_together, warm_up_drafting
from dsv4.runner.experts.swapper import Swapper
from dsv4.runner.forward import (
    forward,
    logits_of,
    sample_tokens,
    sample_verified,
    score,
    score_lines,
    share,
)
from dsv4.runner.graphs import Graphs
from dsv4.runner.plan import SHARE, DraftPart, GraphKey, StepPlan
from dsv4.runner.ranks.lanes import LogitsInFlight
from dsv4.runner.ranks.state_copier import TeamStateCopier, check_state
from dsv4.runner.sampling_rows import PendingResults, SamplingRows
from dsv4.runner.settings import Settings, wants_one_thread
from dsv4.runner.step.line import PENDING as PENDING
from dsv4.runner.step.line import Chunk as Chunk
from dsv4.runner.step.line import order_of_logits, step_line, write_pages, write_step
from dsv4.runner.step.shape import StepShape
from dsv4.runner.step.threads import StepThreads
from dsv4.runner.warmup import warm_up
from dsv4.sampling import SamplingRow
from dsv4.util.progress import Progress

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Started = Callable[[], None]


@dataclass
class SubmittedStep:
    """A step in flight: the sequences it samples for, and the results being copied back."""

    sampled: list[SequencePages]
    positions: list[int]  # of the sampled tokens
    shape: StepShape
    chunks: list[Chunk]  # in row order
    results: PendingResults | None = None
    verify: Verify | None = None  # its rows of drafts
    logits: Tensor | None = None  # with several stages: on their way to rank 0
    drafts: PendingDrafts | None = None  # made after its tokens

    @property
    def is_sampled(self) -> bool:
        return self.results is not None

    @property
    def is_drawn(self) -> bool:
        """Whether the device knows all its tokens; otherwise the host draws row by row."""
        return self.results is not None and (
            self.verify is None or self.results.verified is not None
        )

    @property
    def failures(self) -> dict[int, Exception]:
        """Why a token does not count, by place in `sampled`."""
        return {} if self.results is None else self.results.failures


def _with_own_ops(
    method: Callable[Concatenate["Runner", P], R],
) -> Callable[Concatenate["Runner", P], R]:
    """Ops run with this runner's settings, buffers and threads, and without gradients."""

    @torch.inference_mode()
    @wraps(method)
    def run(self: "Runner", /, *args: P.args, **kwargs: P.kwargs) -> R:
        # as in torch, Inf and NaN are results, not warnings
        with self.ops.active(), self._threads.active(), np.errstate(all="ignore"):
            return method(self, *args, **kwargs)

    return run


class Runner:
    def __init__(
        self,
        model: Transformer,
        settings: Settings,
        progress: Progress | None = None,
        team: Team | None = None,
        draft: DraftModel | None = None,
        swapper: Swapper | None = None,
    ) -> None:
        """With `cuda_graphs` the warm-up runs here and reports to `progress`. The other ranks, the
        `team`, run every step too; their runners are driven by `follow_step` and the like."""
        config, layers = model.config, model.exchange.layout.layers(model.config)
        self.team = team
        self.swapper = swapper
        self.model = model
        self.ops = engine_ops(settings.ops)
        one = wants_one_thread(settings.device, config)
        self._threads = StepThreads(settings.device, one=one)
        self.device = numbered(settings.device)
        share, homes = settings.home_share, settings.homes
        geometry, slots = share.geometry(config), share.max_sequences
        num_pages = geometry.num_pages(share.max_context, slots, share.state_tokens)
        self.homes = [StatePages(geometry, slots, num_pages, home) for home in range(homes)]
        self.pages = self.homes[0]  # of rank 0
        self.state = StateTensors(
            geometry, slots, num_pages, settings.device, layers, spare=homes > 1
        )
        self.place = model.exchange.layout.tp_rank
        self.buffers = StepBuffers(
            geometry, settings.max_sequences, settings.max_context, self.device,
            settings.draft_tokens, homes, self.place,
        )  # fmt: skip
        if homes > 1:
            self.buffers.set_spare_page(num_pages["window"])
        self.drafter: DeviceDrafter | None = None
        if draft is not None:
            drafts = self.state.drafts, self.buffers, settings.draft_tokens
            self.drafter = device_drafter(draft, *drafts)
        self.guard = CompileGuard(self.device)
        self.plan = StepPlan()
        self.costs: StepCosts | None = None
        exchange = model.exchange
        self._sampling = SamplingRows(self.buffers, exchange.comm.error, exchange.expert_load)
        self.expert_load = (0, 0)  # with tp: pairs on the fullest rank, and in all
        self.home_load = (0, 0)  # with several homes: tokens at the fullest, and in all
        self._in_flight = LogitsInFlight(model, self.device)
        self._written: list[SequencePages | None] = [None] * settings.max_sequences
        self._graphs: Graphs | None = None
        if settings.cuda_graphs:
            try:
                warm_up_drafting(self, lambda: self.warm_up(progress))
            except KernelError as error:
                log.warning("steps run one launch at a time, without graphs: %s", error)
        if team is not None:
            team.wait_for("ready")
            team.ready()

    @property
    def num_lanes(self) -> int:
        """Steps that can be in flight together, with different sequences: one per stage."""
        return self.model.exchange.layout.pp

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be submitted before the last one's tokens are known. With several
        stages, other sequences keep the device busy instead."""
        return self.device.type == "cuda" and self.num_lanes == 1

    # --- steps --------------------------------------------------------------------------------

    @_with_own_ops
    def submit(
        self, chunks: Sequence[Chunk], started: Started | None = None,
        rows: Sequence[SamplingRow] = (), num_drafts: int = 0,
    ) -> SubmittedStep:  # fmt: skip
        """Queue the model's part of a step; at most the last token of each chunk is sampled.

        Pages are allocated first; if there are too few, nothing changes. `started` is called
        once the step is queued, before pages behind the window are freed. With `rows` to sample and
        drafts to make next, a verify step is queued as a whole, if there is a graph for that."""
        chunks = sorted(chunks, key=lambda chunk: -chunk.num_logits)  # rows of logits come first
        if not 0 < len(chunks) <= self.buffers.max_sequences:
            raise CapacityError(
                f"{len(chunks)} sequences in one step, expected 1 to "
                f"{self.buffers.max_sequences}; raise max_sequences or send fewer"
            )
        counts = [len(chunk.token_ids) for chunk in chunks]
        longest = max(c.pages.length + n for c, n in zip(chunks, counts, strict=True))
        if longest > self.buffers.contexts[-1]:
            raise CapacityError(
                f"a sequence has {longest} tokens, the context ends at {self.buffers.contexts[-1]}"
            )
        shape, *_ = shapes = self._shapes(chunks, counts, longest)
        verify = Verify(shape, counts) if shape.width > 1 else None
        sampled = [chunk.pages for chunk in chunks if chunk.num_logits]
        whole, drafter = DraftPart("whole step", shape, num_drafts), self.drafter
        if not rows or self._graphs is None or whole not in self._graphs:
            drafter = None
        if drafter is not None:
            self._sampling.prepare(rows, sampled, [0] * len(rows), shape.sequences)
        logits = self._queue(shapes, chunks, counts, started, shape if drafter is None else whole)
        positions = [c.pages.length - c.num_drafts for c in chunks if c.num_logits]
        step = SubmittedStep(sampled, positions, shape, list(chunks), None, verify, logits)
        if drafter is not None:
            step.results = self._sampling.read_rows(rows, counts)
            step.drafts = drafter.read(range(len(rows)), num_drafts, step.results)
        return step

    @_with_own_ops
    def queue_drafts(
        self,
        submitted: SubmittedStep,
        places: Sequence[int],
        num_drafts: int,
        counts: Sequence[int] = (),
        rows: Sequence[SamplingRow] = (),
    ) -> None:
        """Queue `num_drafts` drafts after a step's tokens, for each of its sequences at `places`;
        if there are none, only store the keys. If the host did the sampling, `counts` says how many
        tokens of each sequence count, and `rows` how to sample those at `places`."""
        drafter = self.drafter
        assert drafter is not None
        drafter.send(places, counts)
        shape = replace(submitted.shape, context=self.buffers.contexts[0])  # same for all
        self._run(DraftPart("draft keys", shape))
        if places:
            wanted = drafter.shape(len(places), num_drafts)
            if counts:
                owners = [submitted.sampled[place] for place in places]
                self._sampling.prepare(rows, owners, [0] * len(rows), wanted.sequences)
            self._run(DraftPart("drafts", wanted))
            submitted.drafts = drafter.read(places, num_drafts)

    def _shapes(self, chunks: Sequence[Chunk], counts: list[int], longest: int) -> list[StepShape]:
        """The shape of a step at each home."""
        if any(chunk.num_drafts for chunk in chunks):
            return [self.buffers.verify_shape(counts, longest)]
        one_each = max(counts) == 1
        if len(self.homes) == 1:
            return [self.buffers.shape(sum(counts), len(chunks), longest, one_each=one_each)]
        sizes = [(sum(counts[i] for i in own), len(own)) for own in self._by_home(chunks)]
        fullest, every = self.home_load
        self.home_load = fullest + max(rows for rows, _ in sizes), every + sum(counts)
        return self.buffers.home_shapes(sizes, longest, one_each=one_each)

    def _by_home(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """Which chunks are whose."""
        found: list[list[int]] = [[] for _ in self.homes]
        for place, chunk in enumerate(chunks):
            found[chunk.pages.home].append(place)
        return found

    @_with_own_ops
    def sample(self, submitted: SubmittedStep, rows: Sequence[SamplingRow]) -> None:
        """Queue the sampling of a step: one token per sequence in `submitted.sampled`. With drafts,
        this samples the first row of each sequence, or all rows if none needs the host. With
        several stages, it waits for the last one."""
        self._receive(submitted.shape, submitted.logits)
        if submitted.verify is not None and samples_together(rows, self.device):
            self._sampling.prepare(
                rows, submitted.sampled, submitted.positions, submitted.verify.places
            )
            self._run(submitted.verify.key(self.buffers))
            submitted.results = self._sampling.read_rows(rows, submitted.verify.counts)
            return
        self.sample_round(submitted, range(len(rows)), rows)

    @_with_own_ops
    def sample_round(
        self, submitted: SubmittedStep, places: Sequence[int], rows: Sequence[SamplingRow]
    ) -> None:
        """Queue the sampling of the next row of these sequences, by their places."""
        sampled, positions = submitted.sampled, submitted.positions
        if submitted.verify is not None:
            submitted.verify.next_rows(self.buffers, places)
            positions = [p + submitted.verify.round for p in positions]
        if rows:
            owners = [sampled[place] for place in places]
            self._run(self._sampling.prepare(rows, owners, [positions[place] for place in places]))
            if self.team is not None and self.runs_ahead:
                self.team.command("share")
                self._run(SHARE)
        submitted.results = self._sampling.read_back(rows)

    def read(self, submitted: SubmittedStep) -> list[list[TokenLogprobs]]:
        """Wait for a step and return the newly drawn tokens of each sequence it sampled."""
        assert submitted.results is not None
        answers = submitted.results.answers()
        if submitted.results.load is not None:
            fullest, every = submitted.results.load.tolist()
            self.expert_load = fullest, every
        return answers

    @_with_own_ops
    def step(self, chunks: Sequence[Chunk]) -> Tensor:
        """fp32 logits of the requested tokens, `[rows, vocabulary]`, in the order of `chunks`.

        Like `submit`, but without graphs and for any number of logits per chunk; only a single
        chunk of up to `scored_tokens` with all its logits runs as a graph."""
        if self._graphs is not None and len(chunks) == 1:
            chunk = chunks[0]
            count = chunk.num_logits
            if count == len(chunk.token_ids) <= self.scored_tokens:
                shape = self.buffers.scored_shape(chunk.pages.length + count)
                self._receive(shape, self._queue([shape] * len(self.homes), chunks, [count]))
                return self.buffers.scores[:count].clone()
        counts = [len(chunk.token_ids) for chunk in chunks]
        with self._allocated_pages(chunks, counts):
            lines = score_lines(chunks, self._by_home(chunks), self.pages, self.buffers)
            if self.team is not None:
                self.team.command_each("score", [(n, line.tobytes()) for n, line in lines])
            with self._together():
                self._in_flight.wait_for_all()
                logits = self._score(*lines[0])
        for chunk in chunks:  # the slots' tables were not written
            self._written[chunk.pages.slot] = None
        return logits

    @property
    def scored_tokens(self) -> int:
        """The largest chunk that `step` scores efficiently, in tokens."""
        return self.buffers.scored if self._graphs is not None else self.buffers.tokens[-1]

    def _queue(
        self,
        shapes: Sequence[StepShape],
        chunks: Sequence[Chunk],
        counts: list[int],
        started: Started | None = None,
        key: GraphKey | None = None,
    ) -> Tensor | None:
        """`shapes`: at each home. Returns where logits of several stages arrive; see `_receive`."""
        if self.swapper is not None:
            self.swapper.between_steps()
        with self._allocated_pages(chunks, counts) as growths:
            self._send(shapes, chunks, counts, growths)
            with self._together():
                self._in_flight.make_room()
                self._run(key or shapes[0])
                logits = self._in_flight.expect(len(logits_of(self.buffers, shapes[0])))
            if len(self.homes) == 1:
                check_state(self.team, self.state, chunks[0].pages)
            if started is not None:
                started()
            for chunk in chunks:
                self._written[chunk.pages.slot] = chunk.pages
        return logits

    def _receive(self, shape: StepShape, logits: Tensor | None) -> None:
        """Wait for the logits that `_queue` returned."""
        if logits is None:
            return
        assert self.team is not None
        self.team.check()
        with self.team.together(), self.guard.watch(strict=False):
            self._in_flight.wait_for(logits)
            logits_of(self.buffers, shape).copy_(logits)

    @contextmanager
    def _allocated_pages(
        self, chunks: Sequence[Chunk], counts: list[int]
    ) -> Iterator[list[Growth]]:
        """Allocate the step's pages on every home; roll back on error."""
        least = [n - c.num_drafts - c.num_unsure for n, c in zip(counts, chunks, strict=True)]
        growths: list[Growth] = []
        try:
            for home, own in zip(self.homes, self._by_home(chunks), strict=True):
                parts = [[each[i] for i in own] for each in (counts, least)]
                growths.append(home.prepare([chunks[i].pages for i in own], *parts))
            yield growths
        except BaseException:
            for home, growth in zip(self.homes, growths, strict=False):
                home.cancel(growth)
            raise
        for home, growth in zip(self.homes, growths, strict=True):
            home.apply(growth)

    @property
    def copiers(self) -> list[StateCopier]:
        """For each home: copies its state for the prefix cache, on all ranks that have it."""
        if self.team is None:
            return [self.state]
        if len(self.homes) == 1:
            return [TeamStateCopier(self.team, self.state)]
        slots = self.buffers.own_sequences
        return [TeamStateCopier(self.team, self.state, h, slots) for h in range(len(self.homes))]

    # --- commands from rank 0 -----------------------------------------------------------------

    @_with_own_ops
    def follow_step(self, shape: StepShape, line: Any) -> None:
        """`line`: the step's line, then (table offset, page) of the pages that do not fit in it."""
        length = step_line(shape).length
        self.buffers.step.array()[:length] = line[:length]
        self._write_pages(line[length:].reshape(-1, 2))
        self.buffers.step.send(length)
        self._run(shape)

    @_with_own_ops
    def follow_share(self) -> None:
        self._run(SHARE)

    @_with_own_ops
    def follow_score(self, numbers: Sequence[int], line: Any) -> None:
        self._score(numbers, line)

    @property
    def _taps(self) -> DraftTaps | None:
        return None if self.drafter is None else self.drafter.taps

    def _run_draft_part(self, part: DraftPart) -> None:
        if part.kind == "verify sampling":
            sample_verified(self.buffers, part.shape)
            return
        assert self.drafter is not None
        if part.kind == "whole step":
            self._run_once(part.shape)
            sample_verified(self.buffers, part.shape)
            self.drafter.follow(part)
            return
        (self.drafter.keys if part.kind == "draft keys" else self.drafter.tokens)(part.shape)

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self.team is None else self.team.together()

    def _run(self, key: GraphKey) -> None:
        """Run a part of a step: the model for a shape, or the sampling of this many rows."""
        if self._graphs is not None and key in self._graphs:
            self._graphs.run(key)  # a replay cannot compile, allocate or wait
            return
        with self.guard.watch(strict=False):
            self._run_once(key)

    def _run_once(self, key: GraphKey) -> None:
        if isinstance(key, StepShape):
            with self._staged(key.tokens):
                forward(self.model, self.state.layers, self.buffers, key, self._taps)
        elif isinstance(key, DraftPart):
            self._run_draft_part(key)
        elif isinstance(key, int):
            sample_tokens(self.buffers, key)
        else:
            share(self.model, self.buffers)

    def _staged(self, rows: int) -> AbstractContextManager[None]:
        """Experts that are missing on the GPU are copied there ahead of steps with many rows."""
        return nullcontext() if self.swapper is None else self.swapper.residency.step(rows)

    def _is_staged(self, key: GraphKey) -> bool:
        """Whether a step copies experts; copies vary between steps, so it cannot be a graph."""
        if self.swapper is None or not isinstance(key, StepShape):
            return False
        return key.tokens >= self.swapper.residency.staged_rows

    def load_stats(self) -> dict[str, Any]:
        """Fields of `Stats`: how even ranks are loaded, and experts in host memory."""
        found: dict[str, Any] = {"expert_pairs": self.expert_load, "home_tokens": self.home_load}
        if (swapper := self.swapper) is not None:
            missing = swapper.residency.budget.missing
            found |= {"experts_missing": missing, "num_swaps": swapper.num_swaps}
        return found

    def close(self) -> None:
        """Stop the other ranks and free the experts' host memory; no step may follow."""
        if self.swapper is not None:
            self.swapper.close()
        if self.team is not None:
            self.team.close()

    # --- host inputs of a step ----------------------------------------------------------------

    def _new_pages(self, chunks: Sequence[Chunk], growth: Growth) -> list[tuple[int, int]]:
        """(table offset, page) of every page that the device does not know yet."""
        buffers, fresh, found = self.buffers, set(), []
        for chunk in chunks:
            held = chunk.pages
            if self._written[held.slot] is not held:
                fresh.add(id(held))
                for pool in POOLS:
                    found += [
                        (buffers.page_place(pool, held.slot, column), page)
                        for column, page in held.columns[pool].items()
                    ]
        for held, pool, column in growth.taken:
            if id(held) not in fresh:
                page = held.columns[pool][column]
                found.append((buffers.page_place(pool, held.slot, column), page))
        return found

    def _send(
        self,
        shapes: Sequence[StepShape],
        chunks: Sequence[Chunk],
        counts: list[int],
        growths: Sequence[Growth],
    ) -> None:
        """Fill a step's line for each home, and start the copy of rank 0's to the device."""
        by_home, lines = self._by_home(chunks), []
        slots, order = self.buffers.own_sequences, self._order(shapes[0], by_home, counts)
        for home, (shape, own) in enumerate(zip(shapes, by_home, strict=True)):
            line, mine = step_line(shape), [chunks[i] for i in own]
            array = self.buffers.step.array() if home == 0 else np.zeros(line.length, np.int64)
            at: dict[str, Any] = line.views(array)
            beyond = write_pages(at, self._new_pages(mine, growths[home]))
            write_step(at, shape, mine, [counts[i] for i in own], slots)
            if shape.homes:
                at["order"][:] = order + [0] * (len(at["order"]) - len(order))
            if home == 0:
                self._write_pages(beyond)
                self.buffers.step.send(line.length)
            if self.team is not None:
                tail = beyond.tobytes()
                lines.append((shape.numbers, array[: line.length].tobytes() + tail))
        if self.team is not None:
            self.team.command_each("home_step" if shapes[0].homes else "step", lines)

    def _order(self, shape: StepShape, by_home: list[list[int]], counts: list[int]) -> list[int]:
        if not shape.homes:
            return []
        rows = counts if shape.scored else [1] * len(counts)
        return order_of_logits(by_home, rows, max(shape.home_logits))

    def _write_pages(self, pairs: Any) -> None:
        """Write pages that do not fit in a step's line: (table offset, page)."""
        if len(pairs):
            values = torch.from_numpy(np.array(pairs))
            if self.device.type == "cuda":
                values = values.pin_memory().to(self.device, non_blocking=True)
            self.buffers.slot_tables.pages[values[:, 0]] = values[:, 1]

    def _score(self, numbers: Sequence[int], line: Any) -> Tensor:
        rows = sum(numbers[4 + numbers[0] : 4 + 2 * numbers[0]])
        with self.guard.watch(strict=False), self._staged(rows):
            return score(self.model, self.state.layers, numbers, line, self.device)

    # --- before the first step ----------------------------------------------------------------

    @_with_own_ops
    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile and capture every shape of a step; then arm the guard."""
        buffers, graphs = self.buffers, Graphs()
        keys: list[GraphKey] = [*buffers.shapes(), *reversed(buffers.batches)]
        keys += draft_parts(buffers, self.drafter)
        alone = self.model.exchange.layout.world == 1
        keys += [] if alone or self.num_lanes > 1 else [SHARE]
        few, some = self.model.distinct()
        layers = [self.state.layers[i] for i in some]
        taps = None if self._taps is None else self._taps.of_last(len(some))

        def compiled(key: GraphKey) -> None:
            with nullcontext() if isinstance(key, str) else self.plan.recording(key):
                if isinstance(key, StepShape):
                    forward(few, layers, buffers, key, taps)
                    self._in_flight.wait_for(self._in_flight.expect(len(logits_of(buffers, key))))
                else:
                    self._run_once(key)

        captured = [key for key in keys if not self._is_staged(key)]
        if self.drafter is not None and self.swapper is None:
            captured += self.drafter.whole_steps()
        warm_up(
            self.device,
            [partial(compiled, key) for key in keys],
            partial(graphs.capture, [(key, partial(self._run_once, key)) for key in captured]),
            len(captured),
            progress,
        )
        for line in self.plan.summary():
            log.info("%s", line)
        self._graphs = graphs
        if alone:  # other ranks would have to run along
            self.costs = StepCosts.measure(buffers, self._run)
        self.state.warm_up_copies()
        torch.topk(buffers.logits[0], 1)  # torch also loads its kernels on first use
        buffers.scores.clone()  # allocates the memory that `step` returns
        self.buffers.step.line.zero_()
        self.guard.arm()
