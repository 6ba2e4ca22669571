"""A step's inputs and outputs, at fixed addresses.

A step has a *shape*: token rows, sequences, tokens of context. All host inputs of a step are packed
into one line of integers, so that a single copy brings them to the device; the offsets of its parts
follow from the shape. Page tables and the sampling state stay on the device, one row per slot.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.geometry import PAGE_ENTRIES, POOLS, TOKENS_PER_ENTRY, Geometry, Pool
from dsv4.model.inputs import StepInputs
from dsv4.ops.core.ragged import Kept, Ragged
from dsv4.ops.kv.begin_step import SlotTables
from dsv4.ops.sample.accept import Sampled
from dsv4.ops.sample.sample import WORD_BITS, SampleInputs

ALIGNED = 16  # integers: Triton specialises on addresses divisible by 16 bytes
STAGES = 4  # host buffers used in rotation: the previous copy may still be in flight
SCORED = 256  # tokens of a step that scores a prompt's own


@dataclass(frozen=True)
class StepShape:
    """The shape of a step. With one token per sequence rows are sequences and padding rows
    duplicate row 0; otherwise padding rows come last and belong to no sequence."""

    tokens: int
    sequences: int
    context: int
    one_each: bool
    scored: bool = False  # logits of all rows, not of one per sequence

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens}x{self.sequences} context {self.context}"

    @property
    def kind(self) -> str:
        return "decode" if self.one_each else "score" if self.scored else "prompt"


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then in steps of 8 to 64, of 16 to 128, of 32; the last is `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max(most, 128) + 1, 32)]
    return [size for size in sizes if size < most] + [most]


def token_sizes(most: int) -> list[int]:
    """Row counts of prefill steps: in steps of 16 to 64, of 32 to 128, of 64 to 640, of 128 to
    1280, then of 256; the last is `most`."""
    sizes = [16, 32, 48, 64, 96, *range(128, 640, 64), *range(640, 1280, 128)]
    sizes += range(1280, max(most, 1280) + 1, 256)
    return [size for size in sizes if size < most] + [most]


def context_sizes(most: int) -> list[int]:
    """4096 tokens, then four times as many each; the last is `most`."""
    sizes, size = [], 4096
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]


@dataclass(frozen=True)
class LineLayout:
    """Offsets and lengths of the parts of a line of integers."""

    parts: dict[str, tuple[int, int]]
    length: int

    @classmethod
    def of(cls, **lengths: int) -> "LineLayout":
        parts, end = {}, 0
        for name, length in lengths.items():
            parts[name] = (end, length)
            end += -(-length // ALIGNED) * ALIGNED
        return cls(parts, end)

    def views(self, line: Any) -> dict[str, Any]:
        """Views of the parts in a tensor or an array."""
        return {name: line[first : first + n] for name, (first, n) in self.parts.items()}


def step_line(shape: StepShape) -> LineLayout:
    """`places` and `pages` hold as many pages as a step of this shape can allocate."""
    tokens, sequences = shape.tokens, shape.sequences
    new = len(POOLS) * sequences + sum(
        tokens // (PAGE_ENTRIES[pool] * TOKENS_PER_ENTRY[pool]) + 1 for pool in POOLS
    )
    each = ("slots", "starts", "ends", "first_rows", "keep_ends", "keep_rows", "logits_rows")
    return LineLayout.of(
        **dict.fromkeys(each, sequences),
        **dict.fromkeys(("token_ids", "positions", "seq_idx"), tokens),
        num_pages=1,
        places=new,
        pages=new,
    )


_WHOLE = ("seeds", "positions", "slots", "flags", "top_k")
_REAL = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


def sampling_line(rows: int) -> LineLayout:
    """Floats are stored in the first halves of their integers."""
    return LineLayout.of(**dict.fromkeys((*_WHOLE, *_REAL), rows))


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


class StepBuffers:
    def __init__(
        self, geometry: Geometry, max_sequences: int, max_context: int, device: torch.device
    ) -> None:
        count, vocab_size = max_sequences, geometry.config.vocab_size
        self.device = device
        self.pads = device.type != "cpu"  # few shapes, so that each can be a graph
        self.vocab_size = vocab_size
        self.max_sequences = count
        self.batches = batch_sizes(count)
        self.tokens = token_sizes(max(geometry.chunk_tokens + count - 1, 16))
        self.scored = next((size for size in self.tokens if size >= SCORED), self.tokens[-1])
        self.contexts = context_sizes(max_context)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        widths = self._widths(geometry, self.contexts[-1])
        firsts = tuple(count * sum(widths[:i]) for i in range(len(widths)))
        self.slot_tables = SlotTables(ints(count * sum(widths)), firsts, widths)
        self._tables = {
            context: tuple(ints(count * w) for w in self._widths(geometry, context))
            for context in self.contexts
        }
        largest = StepShape(self.tokens[-1], count, self.contexts[-1], False)
        self.step = StagedLine(step_line(largest).length, device)
        self.sampling_stage = StagedLine(sampling_line(count).length, device)
        self.token_ids = ints(self.tokens[-1])
        self.rows = torch.arange(count, device=device)
        self.newest = ints(count)
        self.sampled = ints(count)
        self.chosen, self.norms = (torch.zeros(count, device=device) for _ in range(2))
        self.logits = torch.zeros(count, vocab_size, device=device)
        self.seen = torch.zeros(count, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(count, vocab_size, device=device)
        words = -(-vocab_size // WORD_BITS)
        self.mask = torch.zeros(count, words, dtype=torch.int32, device=device)

    @cached_property
    def scores(self) -> Tensor:
        """Logits of a step that scores; there only where steps have few shapes."""
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
            batch = self.batch(sequences)
            return StepShape(batch, batch, context, True)
        rows = next(size for size in self.tokens if size >= tokens)
        return StepShape(rows, self.max_sequences, context, False)

    def batch(self, rows: int) -> int:
        """The smallest batch size, of rows to sample or sequences to decode, that fits `count`."""
        return next(size for size in self.batches if size >= rows) if self.pads else rows

    def shapes(self) -> list[StepShape]:
        """Every shape that can occur, largest first, so that memory is allocated once."""
        prompts = [
            StepShape(tokens, self.max_sequences, context, False)
            for tokens in reversed(self.tokens)
            for context in reversed(self.contexts)
        ]
        prompts += [self.scored_shape(context) for context in reversed(self.contexts)]
        return prompts + [
            StepShape(batch, batch, context, True)
            for context in reversed(self.contexts)
            for batch in reversed(self.batches)
        ]

    def scored_shape(self, length: int) -> StepShape:
        """For a chunk of a prompt whose own tokens are scored, up to `length` tokens."""
        context = next(size for size in self.contexts if size >= length)
        return StepShape(self.scored, self.max_sequences, context, False, scored=True)

    def tables(self, shape: StepShape) -> tuple[Tensor, ...]:
        """One row per sequence of the step."""
        count = shape.sequences
        return tuple(
            table[: count * (table.numel() // self.max_sequences)].view(count, -1)
            for table in self._tables[shape.context]
        )

    def inputs(self, shape: StepShape) -> StepInputs:
        at = step_line(shape).views(self.step.line)
        if shape.one_each:
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
            token_ids=self.token_ids[: shape.tokens],
            batch=batch,
            window_table=window,
            csa_table=csa,
            hca_table=hca,
            logits_rows=None if shape.one_each or shape.scored else at["logits_rows"],
        )

    def sampling(self, rows: int) -> SampleInputs:
        at = sampling_line(rows).views(self.sampling_stage.line)
        real = {name: at[name].view(torch.float32)[:rows] for name in _REAL}
        whole = {name: at[name] for name in _WHOLE}
        return SampleInputs(**real, **whole, seen=self.seen, bias=self.bias, mask=self.mask)

    def results(self, rows: int) -> Sampled:
        return Sampled(
            self.newest, self.sampled[:rows], self.chosen[:rows], self.norms[:rows], self.seen
        )

    def page_place(self, pool: Pool, slot: int, column: int) -> int:
        """Offset of a page in the table line; the window's columns form a ring."""
        index = POOLS.index(pool)
        width = self.slot_tables.widths[index]
        return self.slot_tables.firsts[index] + slot * width + column % width


def sampling_arrays(array: Any, rows: int) -> Iterator[tuple[str, Any]]:
    """The parts of a sampling line as the host writes them."""
    for name, part in sampling_line(rows).views(array).items():
        yield name, part.view(np.float32)[:rows] if name in _REAL else part
