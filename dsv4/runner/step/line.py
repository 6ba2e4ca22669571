"""The line of integers that describes a step to the device, and how the host fills it.

All host inputs of a step are packed into one line, so a single copy brings them to the device, and
a single command to another rank; the offsets of its parts follow from the step's shape.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4.cache.geometry import PAGE_ENTRIES, POOLS, TOKENS_PER_ENTRY
from dsv4.cache.pages import SequencePages
from dsv4.ops.kv.begin_step import NEWEST
from dsv4.runner.step.shape import StepShape

ALIGNED = 16  # integers: Triton specialises on addresses divisible by 16 bytes
PENDING = [NEWEST]  # a chunk whose only token is still on the device


@dataclass(slots=True)
class Chunk:
    """New tokens of one sequence, and how many of the last ones need logits."""

    pages: SequencePages
    token_ids: Sequence[int]
    num_logits: int
    keep_len: int = 0  # a boundary inside the chunk to snapshot, and its row
    keep_row: int = 0
    num_drafts: int = 0  # trailing tokens that may be rejected: `StatePages.retract`
    num_unsure: int = 0  # of the tokens before it: drafts of a step that was not read yet
    next_id: int = NEWEST  # the token after them, for drafters, if known


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
    """`places` and `pages` have room for all pages that a step of this shape can allocate."""
    tokens, sequences = shape.tokens, shape.sequences
    if shape.width > 1:
        new = 2 * len(POOLS) * sequences  # a step is shorter than a page
        return LineLayout.of(
            **dict.fromkeys(("slots", "starts", "most"), sequences),
            token_ids=sequences * shape.width,
            num_pages=1,
            places=new,
            pages=new,
        )
    new = len(POOLS) * sequences + sum(
        tokens // (PAGE_ENTRIES[pool] * TOKENS_PER_ENTRY[pool]) + 1 for pool in POOLS
    )
    each = ("slots", "starts", "ends", "first_rows", "keep_ends", "keep_rows", "logits_rows")
    return LineLayout.of(
        **dict.fromkeys((*each, "next_ids"), sequences),
        **dict.fromkeys(("token_ids", "positions", "seq_idx"), tokens),
        num_pages=1,
        places=new,
        pages=new,
        **({"order": shape.num_logits} if shape.homes else {}),
    )


WHOLE = ("seeds", "positions", "slots", "flags", "top_k")
REAL = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


def sampling_line(rows: int) -> LineLayout:
    """Floats are stored in the first halves of their integers."""
    return LineLayout.of(**dict.fromkeys((*WHOLE, *REAL), rows))


def sampling_arrays(array: Any, rows: int) -> Iterator[tuple[str, Any]]:
    """The parts of a sampling line as the host writes them."""
    for name, part in sampling_line(rows).views(array).items():
        yield name, part.view(np.float32)[:rows] if name in REAL else part


def write_step(
    at: dict[str, Any],
    shape: StepShape,
    chunks: Sequence[Chunk],
    counts: Sequence[int],
    num_slots: int,
) -> None:
    """Fill a step's line, all but its pages; `counts`: tokens of each chunk. Slots are numbered
    over homes of `num_slots` each, a line's slots within one; the one after them is spare."""
    n = len(chunks)
    starts = [chunk.pages.length for chunk in chunks]
    known = [-1 if chunk.num_unsure else chunk.pages.length for chunk in chunks]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    columns: dict[str, list[int]] = {
        "slots": [chunk.pages.slot % num_slots for chunk in chunks],
        "starts": known,  # -1: the length that the device holds
        "ends": ends,
        "next_ids": [chunk.next_id for chunk in chunks],
    }
    spare = {"slots": num_slots, "ends": 1}  # of a home without sequences: the first token of none
    for name in at.keys() & columns.keys():
        at[name][:n] = columns[name]
        # padding sequences have no tokens
        padding = columns[name][0] if n else spare.get(name, 0)
        at[name][n:] = padding if shape.one_each else 0
    if shape.width > 1:
        _write_drafts(at, shape, [chunk.token_ids for chunk in chunks], ends)
    elif shape.one_each:
        at["token_ids"][:n] = [chunk.token_ids[0] for chunk in chunks]
        at["token_ids"][n:] = chunks[0].token_ids[0] if n else 0
    else:
        _write_rows(at, shape, chunks, counts)


def _write_rows(
    at: dict[str, Any], shape: StepShape, chunks: Sequence[Chunk], counts: Sequence[int]
) -> None:
    """Per-row values where sequences have several rows; padding is -1."""
    n, end = len(chunks), 0
    at["keep_ends"][:] = 0
    at["logits_rows"][:] = 0
    at["first_rows"][n:] = 0
    for place, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        rows = slice(end, end + count)
        start = chunk.pages.length
        at["token_ids"][rows] = chunk.token_ids
        at["positions"][rows] = range(start, start + count)
        at["seq_idx"][rows] = place
        at["first_rows"][place] = end
        at["keep_ends"][place] = chunk.keep_len
        at["keep_rows"][place] = chunk.keep_row
        end += count
        at["logits_rows"][place] = end - 1
    at["token_ids"][end:] = -1
    at["positions"][end:] = -1
    at["seq_idx"][end:] = shape.sequences - 1


def _write_drafts(
    at: dict[str, Any], shape: StepShape, token_ids: Sequence[Sequence[int]], ends: Sequence[int]
) -> None:
    """Each sequence's tokens and drafts, and the length they reach."""
    at["token_ids"][:] = -1
    at["most"][:] = 0
    for place, (tokens, most) in enumerate(zip(token_ids, ends, strict=True)):
        first = place * shape.width
        at["token_ids"][first : first + len(tokens)] = tokens
        at["most"][place] = most


def write_pages(at: dict[str, Any], new_pages: Sequence[tuple[int, int]]) -> Any:
    """Write (table offset, page) pairs; returns them all if the line has no room for them, as when
    a sequence starts from a long prefix, else none."""
    beyond = np.empty((0, 2), dtype=np.int64)
    if len(new_pages) > len(at["places"]):
        beyond, new_pages = np.array(new_pages, dtype=np.int64), []
    at["num_pages"][0] = len(new_pages)
    if new_pages:
        places, pages = zip(*new_pages, strict=True)
        at["places"][: len(places)], at["pages"][: len(pages)] = places, pages
    return beyond


def order_of_logits(by_home: Sequence[Sequence[int]], rows: Sequence[int], most: int) -> list[int]:
    """Where the logits of each chunk are, gathered from homes that bring `most` rows each:
    `by_home` has the chunks of each home, `rows` the rows of logits of each chunk."""
    order: list[list[int]] = [[] for _ in rows]
    for home, chunks in enumerate(by_home):
        first = home * most
        for chunk in chunks:
            order[chunk] = list(range(first, first + rows[chunk]))
            first += rows[chunk]
    return [place for places in order for place in places]
