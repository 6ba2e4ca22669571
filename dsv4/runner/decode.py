"""Decoding: one token for each running sequence, without the host in between.

`decode_step` is a pure function of `DecodeBuffers`: everything that varies is read from them,
and the sampled token is written where the next step reads its input. On a GPU it is captured
once per bucket and replayed; on a CPU the same function simply runs. `Decoder` is the host's
side: it knows which sequence sits at which place, takes pages ahead of a step, and reads tokens
behind it. `advance` keeps the device busy meanwhile: it queues the step after next on the guess
that the same sequences go on. If they do not, that step is forgotten. It has only written what
the same tokens at the same positions will write again, and pages that are given to others are
written by these later.

A bucket's places beyond the sequences repeat the first one. They read what it reads and write
the same bytes to the same places, so they leave no trace, need no page of their own, and visit
no expert that it does not.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.geometry import POOLS, SHARED_TOKENS, Pool
from dsv4.cache.kinds import LayerState
from dsv4.cache.pages import Growth, SequencePages, StatePages
from dsv4.errors import CapacityError
from dsv4.model.transformer import Transformer
from dsv4.ops.sample.accept import accept
from dsv4.ops.sample.sample import sample
from dsv4.request import SamplingParams, TokenLogprobs
from dsv4.runner.buffers import Bucket, DecodeBuffers, to_device
from dsv4.sampling import Draw, sample_inputs

AHEAD = 4  # steps that may be under way before their tokens are read


def decode_step(
    model: Transformer, state: Sequence[LayerState], buffers: DecodeBuffers, bucket: Bucket
) -> None:
    """No branch on data, no waiting, no memory that outlives the step."""
    logits = model(buffers.inputs(bucket), state)
    if bucket.samples:
        tokens, norms = sample(logits, buffers.sampling(bucket))
        accept(tokens, logits, norms, buffers.next_inputs(bucket))
    else:
        buffers.logits[: bucket.batch].copy_(logits)


def samples_on_device(params: SamplingParams) -> bool:
    """Whether a request's tokens can be drawn inside the step: what needs the tokens so far
    (penalties, a guide), a bias over the vocabulary or several log-probabilities cannot."""
    return not (
        params.has_penalties or params.logit_bias or params.logprobs or params.guide is not None
    )


@dataclass(frozen=True)
class Row:
    """A sequence to decode: its pages, its newest token (not in the state yet), how to draw."""

    pages: SequencePages
    token_id: int
    draw: Draw | None = None  # None: only logits are wanted


@dataclass
class _Reading:
    """Tokens and log-probabilities of one step on their way to the host."""

    tokens: Tensor
    chosen: Tensor
    event: Any  # torch.cuda.Event, or None on a CPU


class Decoder:
    def __init__(
        self,
        pages: StatePages,
        buffers: DecodeBuffers,
        run: Callable[[Bucket], None],
    ) -> None:
        self.buffers = buffers
        self._pages = pages
        self._run = run
        self._seats: list[SequencePages] = []  # who sits at which place
        # whose pages each row of the tables holds, and how many tokens that sequence had then
        self._written: list[tuple[SequencePages, int] | None] = []
        self._forget_tables()
        self._context = 0  # whose tables hold the seats' pages
        self._order: list[int] = []  # place of each row of the caller
        self._samples = False
        self._under_way: deque[_Reading] = deque()
        self._ahead: Growth | None = None  # of the step that was queued on a guess
        self._read: list[int] = []  # tokens of the last step that was read

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def place(self, rows: Sequence[Row]) -> None:
        """Sequences take their places; those that were seated keep theirs where possible.

        Tokens still under way must have been read: a row brings its newest token.
        """
        self._forget_ahead()
        assert not self._under_way, "read the tokens under way before changing places"
        most = self.buffers.batches[-1]
        if not 0 < len(rows) <= most:
            raise CapacityError(
                f"{len(rows)} sequences to decode at once, expected 1 to {most}; raise "
                "max_sequences or send fewer"
            )
        self._seats, self._order = _seat(self._seats, [row.pages for row in rows])
        by_place = sorted(zip(self._order, rows, strict=True), key=lambda pair: pair[0])
        draws = [row.draw for row in rows if row.draw is not None]
        self._samples = len(draws) == len(rows)
        self._set_inputs([row for _, row in by_place])

    def _set_inputs(self, rows: list[Row]) -> None:
        """Tokens, positions, slots and settings of all places, the spare ones included."""
        buffers = self.buffers
        n = self._batch
        spare = [rows[0]] * (n - len(rows))
        starts = [row.pages.length for row in rows + spare]
        columns = (
            (buffers.token_ids, [row.token_id for row in rows + spare]),
            (buffers.positions, starts),
            (buffers.ends, [start + 1 for start in starts]),
            (buffers.slots, [row.pages.slot for row in rows + spare]),
        )
        values = torch.tensor([column for _, column in columns], dtype=torch.int64)
        moved = to_device(values, buffers.device)
        for (target, _), source in zip(columns, moved, strict=True):
            target[:n].copy_(source)
        if self._samples:
            draws = [row.draw for row in rows + spare if row.draw is not None]
            host = torch.device("cpu")
            buffers.set_sampling(range(n), sample_inputs(draws, buffers.vocab_size, host))

    @property
    def _batch(self) -> int:
        count = len(self._seats)
        return next(size for size in self.buffers.batches if size >= count)

    def advance(self, rows: Sequence[Row]) -> None:
        """A step for these rows, and if they may go on, the next one behind it."""
        if self._continues(rows):
            assert self._ahead is not None
            self._pages.apply(self._ahead)
            self._ahead = None
        else:
            self.place(rows)
            self.submit()
        # prefixes are kept at whole blocks, from the state as it is then
        at_block = any(pages.length % SHARED_TOKENS == 0 for pages in self._seats)
        if not at_block and self._fits_ahead():
            try:
                self.submit(ahead=True)
            except BaseException:
                self._under_way.clear()  # the step before fails with it
                raise

    def _continues(self, rows: Sequence[Row]) -> bool:
        """Whether the step queued ahead is the next one of exactly these rows."""
        if not self._pages.is_ahead(self._ahead) or len(rows) != len(self._seats):
            return False
        seats = [self._seats[place] for place in self._order]
        same = all(row.pages is held for row, held in zip(rows, seats, strict=True))
        return same and [row.token_id for row in rows] == self._read

    def _fits_ahead(self) -> bool:
        if 1 + max(pages.length for pages in self._seats) > self.buffers.contexts[-1]:
            return False
        return all(
            sum(len(self._pages.missing(pages, pool, 1)) for pages in self._seats)
            <= self._pages.allocators[pool].num_free
            for pool in POOLS
        )

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            if self._pages.is_ahead(self._ahead):
                self._pages.cancel(self._ahead)
            self._ahead = None
            self._under_way.pop()

    def submit(self, ahead: bool = False) -> None:
        """Queue one step for all places. If pages do not suffice, nothing has changed."""
        assert len(self._under_way) < AHEAD, "read tokens before queueing more steps"
        length = 1 + max(pages.length for pages in self._seats)
        if length > self.buffers.contexts[-1]:
            raise CapacityError(
                f"a sequence has {length} tokens, the context ends at {self.buffers.contexts[-1]}"
            )
        bucket = self.buffers.bucket(len(self._seats), length, self._samples)
        growth = self._pages.prepare(self._seats, [1] * len(self._seats), ahead)
        try:
            self._write_tables(growth, bucket)
            self._run(bucket)
        except BaseException:
            self._pages.cancel(growth)
            self._forget_tables()
            raise
        if ahead:
            self._ahead = growth
        else:
            self._pages.apply(growth)
        if self._samples:
            self._under_way.append(self._copy_back(bucket.batch))

    def read(self) -> list[TokenLogprobs]:
        """The oldest step's tokens, in the order of the rows that were placed."""
        reading = self._under_way.popleft()
        if reading.event is not None:
            reading.event.synchronize()
        tokens, chosen = reading.tokens.tolist(), reading.chosen.tolist()
        self._read = [tokens[place] for place in self._order]
        return [TokenLogprobs(tokens[place], chosen[place]) for place in self._order]

    def logits(self) -> Tensor:
        """Of the step just submitted, in the order of the rows; valid until the next step."""
        assert not self._samples
        order = torch.tensor(self._order, dtype=torch.int64)
        return self.buffers.logits[to_device(order, self.buffers.device)]

    def _copy_back(self, n: int) -> _Reading:
        tokens, chosen = self.buffers.token_ids[:n], self.buffers.chosen[:n]
        if self.buffers.device.type != "cuda":
            return _Reading(tokens.clone(), chosen.clone(), None)
        reading = _Reading(
            torch.empty(n, dtype=tokens.dtype, pin_memory=True),
            torch.empty(n, dtype=chosen.dtype, pin_memory=True),
            torch.cuda.Event(),  # type: ignore[no-untyped-call]
        )
        reading.tokens.copy_(tokens, non_blocking=True)
        reading.chosen.copy_(chosen, non_blocking=True)
        reading.event.record()
        return reading

    # --- page tables --------------------------------------------------------------------------

    def _forget_tables(self) -> None:
        self._written = [None] * self.buffers.batches[-1]

    def _write_tables(self, growth: Growth, bucket: Bucket) -> None:
        """Whole rows where another sequence sat, or this one grew elsewhere; else new pages."""
        if bucket.context != self._context:
            self._forget_tables()
            self._context = bucket.context
        spare = bucket.batch - len(self._seats)
        seats = [*self._seats, *[self._seats[0]] * spare]
        fresh = set()
        for place, held in enumerate(seats):
            known = self._written[place]
            if known is None or known[0] is not held or known[1] != held.length:
                fresh.add(place)
            self._written[place] = (held, held.length + 1)
        for pool in POOLS:
            self._write_rows(pool, sorted(fresh), seats)
            self._write_pages(pool, growth, fresh, seats)

    def _write_rows(self, pool: Pool, places: list[int], seats: list[SequencePages]) -> None:
        if not places:
            return
        table = self.buffers.tables[self._context][pool]
        rows = {  # places that repeat the first have its row
            id(held): self._pages.table_row(held, pool, table.shape[1])
            for held in (seats[place] for place in places)
        }
        values = torch.tensor([rows[id(seats[place])] for place in places], dtype=torch.int64)
        index = to_device(torch.tensor(places, dtype=torch.int64), table.device)
        table[index] = to_device(values, table.device)

    def _write_pages(
        self, pool: Pool, growth: Growth, fresh: set[int], seats: list[SequencePages]
    ) -> None:
        """Pages that this step took, into rows that are otherwise up to date."""
        width = self.buffers.tables[self._context][pool].shape[1]
        new = [
            (place, column % width, held.columns[pool][column])
            for owner, taken_from, column in growth.taken
            if taken_from == pool
            for place, held in enumerate(seats)
            if held is owner and place not in fresh
        ]
        if not new:
            return
        table = self.buffers.tables[self._context][pool]
        moved = to_device(torch.tensor(new, dtype=torch.int64), table.device)
        table[moved[:, 0], moved[:, 1]] = moved[:, 2]


def _seat(
    seated: list[SequencePages], wanted: list[SequencePages]
) -> tuple[list[SequencePages], list[int]]:
    """(who sits at each of the first places, the place of each of `wanted`)."""
    assert len({id(pages) for pages in wanted}) == len(wanted), "a sequence twice in one step"
    count = len(wanted)
    old = {id(pages): place for place, pages in enumerate(seated[:count])}
    order = [old.get(id(pages), -1) for pages in wanted]
    free = iter(sorted(set(range(count)) - set(order)))
    order = [place if place >= 0 else next(free) for place in order]
    seats = [pages for _, pages in sorted(zip(order, wanted, strict=True), key=lambda p: p[0])]
    return seats, order
