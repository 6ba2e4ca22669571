# mypy: ignore-errors
"""`begin_step` on a GPU: new pages in one launch, then tokens and copied rows in another."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.arguments import leaves
from dsv4.ops.core.launch import device_reason, launch_options
from dsv4.ops.kv.begin_step import NEWEST

WIDTH = 256
WAITING = tl.constexpr(NEWEST)


@triton.jit
def _pages_kernel(table, places, pages, num_pages, most, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    live = (at < most) & (at < tl.load(num_pages))
    place = tl.load(places + at, mask=live, other=0)
    tl.store(table + place, tl.load(pages + at, mask=live, other=0), mask=live)


@triton.jit
def _copy_row(table, slot, seq, column, source_width, out, width):
    live = column < width
    row = tl.load(table + slot * source_width + column, mask=live, other=0)
    tl.store(out + seq * width + column, row, mask=live)


@triton.jit
def _begin_kernel(
    table, first1, first2, source0, source1, source2, out0, out1, out2, width0, width1, width2,
    sent, seq_idx, slots, newest, token_ids, num_tokens, num_sequences, WIDTH: tl.constexpr
):  # fmt: skip
    """The first programs copy parts of the sequences' table rows; the others write tokens."""
    seq = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if seq < num_sequences:
        slot = tl.load(slots + seq)
        _copy_row(table, slot, seq, column, source0, out0, width0)
        _copy_row(table + first1, slot, seq, column, source1, out1, width1)
        _copy_row(table + first2, slot, seq, column, source2, out2, width2)
    elif tl.program_id(1) == 0:
        row = (seq - num_sequences) * WIDTH + tl.arange(0, WIDTH)
        live = row < num_tokens
        token = tl.load(sent + row, mask=live, other=0)
        waits = live & (token == WAITING)
        owner = tl.load(seq_idx + row, mask=waits, other=0)
        own = tl.load(newest + tl.load(slots + owner, mask=waits, other=0), mask=waits, other=0)
        tl.store(token_ids + row, tl.where(waits, own, token), mask=live)


def supports(step) -> str | None:
    if len(step.rows) != 3:
        return f"{len(step.rows)} kinds of tables, kernels know three"
    for _, tensor in leaves(step):
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            return f"{tensor.dtype} with strides {tensor.stride()}, kernels read contiguous int64"
    return device_reason(step.sent.device)


def run(step) -> None:
    most, num_tokens, sequences = (t.shape[0] for t in (step.places, step.sent, step.slots))
    table, rows = step.tables.pages, step.rows
    _pages_kernel[(triton.cdiv(most, WIDTH),)](
        table, step.places, step.pages, step.num_pages, most, WIDTH=WIDTH, **launch_options(4)
    )
    widths = [row.shape[1] for row in rows]
    grid = (sequences + triton.cdiv(num_tokens, WIDTH), triton.cdiv(max(widths), WIDTH))
    _begin_kernel[grid](
        table, *step.tables.firsts[1:], *step.tables.widths, *rows, *widths, step.sent,
        step.seq_idx, step.slots, step.newest, step.token_ids, num_tokens, sequences,
        WIDTH=WIDTH, **launch_options(4),
    )  # fmt: skip
