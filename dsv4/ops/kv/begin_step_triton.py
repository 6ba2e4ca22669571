# mypy: ignore-errors
"""`begin_step` on a GPU: new pages in one launch, then tokens and copied rows in another."""

import torch
import triton
import triton.language as tl

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


def supports(
    tables, places, pages, num_pages, sent, seq_idx, slots, newest, token_ids, rows
) -> str | None:
    if len(rows) != 3:
        return f"{len(rows)} kinds of tables, kernels know three"
    tensors = (tables.pages, places, pages, sent, seq_idx, slots, newest, token_ids, *rows)
    for tensor in tensors:
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            return f"{tensor.dtype} with strides {tensor.stride()}, kernels read contiguous int64"
    return device_reason(sent.device)


def run(tables, places, pages, num_pages, sent, seq_idx, slots, newest, token_ids, rows) -> None:
    most, num_tokens, sequences = places.shape[0], sent.shape[0], slots.shape[0]
    _pages_kernel[(triton.cdiv(most, WIDTH),)](
        tables.pages, places, pages, num_pages, most, WIDTH=WIDTH, **launch_options(4)
    )
    widths = [row.shape[1] for row in rows]
    grid = (sequences + triton.cdiv(num_tokens, WIDTH), triton.cdiv(max(widths), WIDTH))
    _begin_kernel[grid](
        tables.pages, *tables.firsts[1:], *tables.widths, *rows, *widths, sent, seq_idx, slots,
        newest, token_ids, num_tokens, sequences, WIDTH=WIDTH, **launch_options(4),
    )  # fmt: skip
