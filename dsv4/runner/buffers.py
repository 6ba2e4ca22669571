"""A step's inputs and outputs, at fixed addresses.

A step has a *shape*: token rows, sequences, tokens of context. All host inputs of a step are packed
into one line of integers, so a single copy brings them to the device; the offsets of its parts
follow from the shape. Page tables and the sampling state stay on the device, one row per slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.geometry import POOLS, Geometry, Pool
from dsv4.model.inputs import HomeRows, StepInputs
from dsv4.ops.core.ragged import Kept, Ragged
from dsv4.ops.kv.begin_step import SlotTables
from dsv4.ops.sample.accept import Sampled
from dsv4.ops.sample.draft_rows import MOST_DRAFTS, DraftRows
from dsv4.ops.sample.sample import WORD_BITS, SampleInputs
from dsv4.ops.sample.verify import PLACES
from dsv4.runner.step.line import ALIGNED, REAL, WHOLE, sampling_line, step_line
from dsv4.runner.step.shape import StepShape, batch_sizes, context_sizes, token_sizes

STAGES = 4  # host buffers used in rotation: the previous copy may still be in flight
MOST_DRAFT_ROWS = 64  # of all sequences in a step
DRAFT_WIDTHS = (2, 4, 6, 8)  # rows per sequence in a step that verifies drafts
SCORED = 256  # tokens of a step that scores a prompt


def aligned_rows(rows: int, columns: int, like: Tensor) -> Tensor:
    """Uninitialised; each row is aligned like a tensor of its own, because Triton would compile
    kernels again for pointers that are not."""
    return torch.empty(rows, _aligned(columns), dtype=like.dtype, device=like.device)[:, :columns]


def select_columns(x: Tensor, places: Tensor) -> Tensor:
    """`x[:, places]` in one launch, rows aligned."""
    out = aligned_rows(x.shape[0], places.shape[0], x)
    return torch.index_select(x, 1, places, out=out)


class StagedLine:
    """One line on the device and its rotating host buffers."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.line = torch.zeros(length, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        hosts = [
            torch.zeros(length, dtype=torch.int64, pin_memory=pinned)
            for _ in range(STAGES if pinned else 1)
        ]
        self._hosts = [(host, host.numpy()) for host in hosts]
        self._copied: list[Any] = [None] * len(hosts)  # events
        self._turn = -1

    def array(self) -> Any:
        """The next host buffer to write, once its last copy has completed."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        return self._hosts[self._turn][1]

    def send(self, length: int) -> None:
        """Start copying the first `length` numbers to the device."""
        self.line[:length].copy_(self._hosts[self._turn][0][:length], non_blocking=True)
        if self.line.is_cuda:
            self._copied[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied[self._turn].record()


@dataclass(frozen=True)
class VerifyResults:
    """What the host reads of a verify step, in one line and so in one copy."""

    line: Tensor
    max_sequences: int
    rows: int
    num_drafts: int

    @staticmethod
    def make(count: int, rows: int, num_drafts: int, device: torch.device) -> "VerifyResults":
        length = 3 * _aligned(count) + 2 * _aligned(rows) + count * num_drafts
        line = torch.zeros(length, dtype=torch.int64, device=device)
        return VerifyResults(line, count, rows, num_drafts)

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Starts, ends and counts `[3, sequences]`; tokens and log-probabilities of rows; drafts
        `[sequences, drafts]`."""
        count, rows = _aligned(self.max_sequences), _aligned(self.rows)
        sizes = [3 * count, rows, rows, self.max_sequences * self.num_drafts]
        told, tokens, chosen, made = torch.split(self.line, sizes)
        made = made.view(self.max_sequences, self.num_drafts)
        return told.view(3, count), tokens, chosen.view(torch.float32), made


def _aligned(length: int) -> int:
    return -(-length // ALIGNED) * ALIGNED


class VerifyBuffers:
    """Draft rows, their logits and the tokens drawn from them; drafts per slot."""

    def __init__(
        self, max_sequences: int, draft_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        """The last width holds all drafts of a sequence."""
        enough = next(w for w in DRAFT_WIDTHS if w > draft_tokens)
        self.widths = [w for w in DRAFT_WIDTHS if w <= enough]
        rows = max_sequences * enough
        if device.type != "cpu":
            rows = max(min(rows, MOST_DRAFT_ROWS), enough)  # the largest shape

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.results = VerifyResults.make(max_sequences, rows, draft_tokens, device)
        told, self.sampled, self.chosen, self.made = self.results.parts()
        starts, ends, self.counts = (part[:max_sequences] for part in told)
        self.follows = ints(3 + PLACES, _aligned(max_sequences))
        self.rows = DraftRows(ints(rows), ints(rows), ints(rows), ints(max_sequences), starts, ends)
        self.lengths = ints(max_sequences)
        self.drafts = ints(max_sequences, MOST_DRAFTS).fill_(-1)
        self.unused = ints(max_sequences)
        self.logits = torch.zeros(rows, vocab_size, device=device)
        self.nowhere = ints(rows).fill_(-1)
        self.norms = torch.zeros(rows, device=device)

    def laid_out(self, shape: StepShape) -> DraftRows:
        """Where a step's rows are written, with room for `width` rows per sequence."""
        at, rows, n = self.rows, shape.sequences * shape.width, shape.sequences
        return DraftRows(
            *(part[:rows] for part in (at.token_ids, at.positions, at.seq_idx)),
            *(part[:n] for part in (at.first_rows, at.starts, at.ends)),
        )

    def batch(self, shape: StepShape, slots: Tensor) -> tuple[Tensor, Ragged]:
        """Token ids and the batch that the model sees."""
        out, rows = self.laid_out(shape), shape.tokens
        batch = Ragged(
            out.positions[:rows], out.seq_idx[:rows], out.first_rows, out.starts, out.ends, slots,
            is_padded=True, is_few=True,
        )  # fmt: skip
        return out.token_ids[:rows], batch


class StepBuffers:
    def __init__(
        self,
        geometry: Geometry,
        max_sequences: int,
        max_context: int,
        device: torch.device,
        draft_tokens: int = 0,
        homes: int = 1,
        place: int = 0,
    ) -> None:
        """`max_sequences`: of all `homes`; steps hold those of the home at `place`, samples all.
        With several homes, one spare slot stands for a home without sequences."""
        count, vocab_size = max_sequences, geometry.config.vocab_size
        self.device = device
        self.homes, spare = homes, int(homes > 1)
        self.own_sequences = own = count // homes
        self.pads = device.type != "cpu"  # few shapes, so each can be a graph
        self.vocab_size = vocab_size
        self.max_sequences = count
        self.batches = batch_sizes(count)  # of sampling
        self.own_batches = batch_sizes(own)  # of decode steps
        self.tokens = token_sizes(max(geometry.chunk_tokens + own - 1, 16))
        self.scored = next((size for size in self.tokens if size >= SCORED), self.tokens[-1])
        self.contexts = context_sizes(max_context)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        widths = self._widths(geometry, self.contexts[-1])
        slots = own + spare
        firsts = tuple(slots * sum(widths[:i]) for i in range(len(widths)))
        self.slot_tables = SlotTables(ints(slots * sum(widths)), firsts, widths)
        self._tables = {
            context: tuple(ints(own * w) for w in self._widths(geometry, context))
            for context in self.contexts
        }
        self.verify: VerifyBuffers | None = None
        largest = self._shape(self.tokens[-1], own, self.contexts[-1])
        longest = max(step_line(replace(largest, scored=scored)).length for scored in (False, True))
        if draft_tokens:
            self.verify = VerifyBuffers(count, draft_tokens, vocab_size, device)
            widest = StepShape(count, count, self.contexts[-1], False, width=self.verify.widths[-1])
            longest = max(longest, step_line(widest).length)
        self.step = StagedLine(longest, device)
        self.sampling_stage = StagedLine(sampling_line(count).length, device)
        self.token_ids = ints(self.tokens[-1])
        self.rows = torch.arange(count, device=device)
        self.newest = ints(count + spare)
        self.own_newest = self.newest[place % homes * own :][:slots]
        self.sampled = ints(count)
        self.chosen, self.norms = (torch.zeros(count, device=device) for _ in range(2))
        self.logits = torch.zeros(count, vocab_size, device=device)
        self.seen = torch.zeros(count, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(count, vocab_size, device=device)
        words = -(-vocab_size // WORD_BITS)
        self.mask = torch.zeros(count, words, dtype=torch.int32, device=device)

    @cached_property
    def scores(self) -> Tensor:
        """Logits of a scoring step; allocated only where steps have few shapes."""
        return torch.zeros(self.scored, self.vocab_size, device=self.device)

    @staticmethod
    def _widths(geometry: Geometry, context: int) -> tuple[int, ...]:
        growing = (len(geometry.pages_needed(pool, 0, context)) for pool in POOLS[1:])
        return (geometry.window_columns, *(max(1, width) for width in growing))

    def shape(self, tokens: int, sequences: int, length: int, *, one_each: bool) -> StepShape:
        """The smallest shape for a step whose longest sequence reaches `length` tokens."""
        context = next(size for size in self.contexts if size >= length)
        if not self.pads:
            return StepShape(tokens, sequences, context, one_each)
        if one_each:
            batch = next(size for size in self.own_batches if size >= sequences)
            return self._shape(batch, batch, context, one_each=True)
        rows = next(size for size in self.tokens if size >= tokens)
        return self._shape(rows, self.own_sequences, context)

    def home_shapes(
        self, homes: Sequence[tuple[int, int]], length: int, *, one_each: bool
    ) -> list[StepShape]:
        """A shape for each home, given its rows and sequences. Padded, they are equal."""
        if self.pads:
            rows, sequences = (max(counts) for counts in zip(*homes, strict=True))
            return [self.shape(rows, sequences, length, one_each=one_each)] * len(homes)
        shape = self.shape(0, 0, length, one_each=one_each)
        return [
            replace(shape, tokens=rows, sequences=sequences, homes=tuple(homes))
            for rows, sequences in homes
        ]

    def _shape(
        self,
        tokens: int,
        sequences: int,
        context: int,
        *,
        one_each: bool = False,
        scored: bool = False,
    ) -> StepShape:
        homes = ((tokens, sequences),) * self.homes if self.homes > 1 else ()
        return StepShape(tokens, sequences, context, one_each, scored, homes=homes)

    def verify_shape(self, counts: Sequence[int], length: int) -> StepShape:
        """For sequences with this many rows each; the longest reaches `length` tokens."""
        assert self.verify is not None
        context = next(size for size in self.contexts if size >= length)
        width, sequences = max(counts), len(counts)
        if not self.pads:
            return StepShape(sum(counts), sequences, context, False, width=max(width, 2))
        width, batch = next(w for w in self.verify.widths if w >= width), self.batch(sequences)
        return StepShape(batch * width, batch, context, False, width=width)

    def numbers_of_drafts(self, sequences: int) -> Sequence[int]:
        """Drafts per sequence that fill a step's rows."""
        if self.verify is None:
            return ()
        if not self.pads:
            return range(1, self.verify.widths[-1])
        batch = self.batch(sequences)
        return [w - 1 for w in self.verify.widths if batch * w <= MOST_DRAFT_ROWS]

    def batch(self, rows: int) -> int:
        """The smallest batch size that holds `rows` rows to sample or sequences to decode."""
        return next(size for size in self.batches if size >= rows) if self.pads else rows

    def shapes(self) -> list[StepShape]:
        """Every shape that can occur, largest first, so memory is allocated once."""
        prompts = [
            self._shape(tokens, self.own_sequences, context)
            for tokens in reversed(self.tokens)
            for context in reversed(self.contexts)
        ]
        prompts += [self.scored_shape(context) for context in reversed(self.contexts)]
        prompts += self.draft_shapes(self.contexts)
        return prompts + [
            self._shape(batch, batch, context, one_each=True)
            for context in reversed(self.contexts)
            for batch in reversed(self.own_batches)
        ]

    def draft_shapes(self, contexts: Sequence[int]) -> list[StepShape]:
        """Steps that verify drafts, largest first; none without a drafter."""
        widths = [] if self.verify is None else self.verify.widths
        return [
            StepShape(batch * width, batch, context, False, width=width)
            for context in reversed(contexts)
            for batch in reversed(self.batches)
            for width in reversed(widths)
            if batch * width <= MOST_DRAFT_ROWS
        ]

    def scored_shape(self, length: int) -> StepShape:
        """For scoring a chunk of a prompt that reaches `length` tokens."""
        context = next(size for size in self.contexts if size >= length)
        return self._shape(self.scored, self.own_sequences, context, scored=True)

    def tables(self, shape: StepShape) -> tuple[Tensor, ...]:
        """One row per sequence of the step."""
        count = shape.sequences
        widths = (table.numel() // self.own_sequences for table in self._tables[shape.context])
        return tuple(
            table[: count * width].view(count, width)
            for table, width in zip(self._tables[shape.context], widths, strict=True)
        )

    def inputs(self, shape: StepShape) -> StepInputs:
        at = step_line(shape).views(self.step.line)
        token_ids = self.token_ids[: shape.tokens]
        if shape.width > 1:
            assert self.verify is not None
            token_ids, batch = self.verify.batch(shape, at["slots"])
        elif shape.one_each:
            rows, positions = self.rows[: shape.tokens], at["starts"]
            batch = Ragged(positions, rows, rows, positions, at["ends"], at["slots"])
        else:
            batch = Ragged(
                at["positions"],
                at["seq_idx"],
                at["first_rows"],
                at["starts"],
                at["ends"],
                at["slots"],
                Kept(at["keep_ends"], at["keep_rows"]),
                is_padded=self.pads,
            )
        window, csa, hca = self.tables(shape)
        return StepInputs(
            token_ids=token_ids,
            batch=batch,
            window_table=window,
            csa_table=csa,
            hca_table=hca,
            logits_rows=at["logits_rows"] if shape.kind == "prompt" else None,
            homes=self._home_rows(shape, at),
        )

    def _home_rows(self, shape: StepShape, at: dict[str, Tensor]) -> HomeRows | None:
        if not shape.homes:
            return None
        return HomeRows(tuple(rows for rows, _ in shape.homes), shape.home_logits, at["order"])

    def sampling(self, rows: int) -> SampleInputs:
        at = sampling_line(rows).views(self.sampling_stage.line)
        real = {name: at[name].view(torch.float32)[:rows] for name in REAL}
        whole = {name: at[name] for name in WHOLE}
        return SampleInputs(**real, **whole, seen=self.seen, bias=self.bias, mask=self.mask)

    def repeated_sampling(self, rows: int, places: Tensor) -> SampleInputs:
        """`sampling(rows)` of these rows: all integers in one launch, all floats in another."""
        parts = len(WHOLE) + len(REAL)
        line = self.sampling_stage.line[: sampling_line(rows).length].view(parts, -1)
        whole = select_columns(line[: len(WHOLE)], places)
        real = select_columns(line[len(WHOLE) :].view(torch.float32), places)
        settings = dict(zip((*WHOLE, *REAL), (*whole, *real), strict=True))
        return SampleInputs(**settings, seen=self.seen, bias=self.bias, mask=self.mask)

    def row_settings(self, shape: StepShape, batch: Ragged) -> SampleInputs:
        """The settings of a verify step's sequences, repeated for each of their rows."""
        given = self.repeated_sampling(shape.sequences, batch.seq_idx)
        return replace(given, positions=batch.positions + 1)

    def results(self, rows: int) -> Sampled:
        return Sampled(
            self.newest, self.sampled[:rows], self.chosen[:rows], self.norms[:rows], self.seen
        )

    def page_place(self, pool: Pool, slot: int, column: int) -> int:
        """Offset of a page in the table line of the slot's home; the window's columns form a
        ring."""
        index = POOLS.index(pool)
        width = self.slot_tables.widths[index]
        own = slot % self.own_sequences
        return self.slot_tables.firsts[index] + own * width + column % width

    def set_spare_page(self, page: int) -> None:
        """The window page of the spare slot."""
        self.slot_tables.table(0, self.own_sequences + 1)[-1] = page
