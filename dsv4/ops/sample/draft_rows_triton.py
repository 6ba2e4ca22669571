# mypy: ignore-errors
"""`draft_rows` on a GPU: one program; a vector over sequences, a loop over their places."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.arguments import leaves
from dsv4.ops.core.launch import device_reason, launch_options
from dsv4.ops.kv.begin_step import NEWEST
from dsv4.ops.sample.draft_rows import BLOCK, DRAFTED, MOST_DRAFTS

WAITING_TOKEN = tl.constexpr(NEWEST)
WAITING_DRAFT = tl.constexpr(DRAFTED)


@triton.jit
def _token(sent, newest, drafts, seq, slot, inside, place, WIDTH: tl.constexpr, MOST: tl.constexpr):
    """Ids of all sequences in one place."""
    token = tl.load(sent + seq * WIDTH + place, mask=inside, other=-1)
    if place == 0:
        own = tl.load(newest + slot, mask=inside, other=0)
        return tl.where(token == WAITING_TOKEN, own, token)
    own = tl.load(drafts + slot * MOST + place - 1, mask=inside, other=-1)
    return tl.where(token == WAITING_DRAFT, own, token)


@triton.jit
def _rows_kernel(
    sent, starts, most, slots, newest, lengths, drafts, token_ids, positions, seq_idx,
    first_rows, out_starts, out_ends, num_sequences, num_rows, vocab_size,
    WIDTH: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr
):  # fmt: skip
    seq = tl.arange(0, PAD)
    inside = seq < num_sequences
    slot = tl.load(slots + seq, mask=inside, other=0)
    start = tl.load(starts + seq, mask=inside, other=0)
    start = tl.where(start < 0, tl.load(lengths + slot, mask=inside, other=0), start)
    limit = tl.full((PAD,), 1, tl.int64)
    good = inside
    for place in tl.static_range(1, WIDTH):
        token = _token(sent, newest, drafts, seq, slot, inside, place, WIDTH, MOST)
        good = good & (token >= 0) & (token < vocab_size)
        limit += good.to(tl.int64)
    longest = tl.load(most + seq, mask=inside, other=0)
    limit = tl.minimum(limit, tl.minimum(BLOCK - start % BLOCK, longest - start))
    limit = tl.maximum(limit, 1)
    exists = inside & (tl.load(sent + seq * WIDTH, mask=inside, other=-1) != -1)
    limit = tl.where(exists, limit, 0)
    first = tl.cumsum(limit) - limit
    tl.store(first_rows + seq, first, mask=inside)
    tl.store(out_starts + seq, tl.where(exists, start, 0), mask=inside)
    tl.store(out_ends + seq, tl.where(exists, start + limit, 0), mask=inside)
    total = tl.sum(limit)
    row = tl.arange(0, ROWS)
    unused = (row >= total) & (row < num_rows)
    tl.store(token_ids + row, -1, mask=unused)
    tl.store(positions + row, -1, mask=unused)
    tl.store(seq_idx + row, num_sequences - 1, mask=unused)
    for place in tl.static_range(0, WIDTH):
        live = place < limit
        token = _token(sent, newest, drafts, seq, slot, inside, place, WIDTH, MOST)
        tl.store(token_ids + first + place, token, mask=live)
        tl.store(positions + first + place, start + place, mask=live)
        tl.store(seq_idx + first + place, seq.to(tl.int64), mask=live)


def supports(given, out) -> str | None:
    for _, tensor in leaves((given, out)):
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            return f"{tensor.dtype} with strides {tensor.stride()}, kernels read contiguous int64"
    return device_reason(given.sent.device)


def run(given, out) -> None:
    sequences, width = given.sent.shape
    rows = out.positions.shape[0]
    _rows_kernel[(1,)](
        given.sent, given.starts, given.most, given.slots, given.newest, given.lengths,
        given.drafts, out.token_ids, out.positions, out.seq_idx, out.first_rows, out.starts,
        out.ends, sequences, rows, given.vocab_size, WIDTH=width,
        PAD=triton.next_power_of_2(sequences), ROWS=triton.next_power_of_2(rows), BLOCK=BLOCK,
        MOST=MOST_DRAFTS, **launch_options(4),
    )  # fmt: skip
