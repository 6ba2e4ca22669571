# mypy: ignore-errors
"""`attention` of many queries: entries are unpacked once, not for every query.

The first launch writes all entries visible to the step's sequences as rows of 16-bit numbers: for
each sequence the positions from its oldest window on, then its compressed entries. The second
launch (`prefill_gluon.py`) only copies rows.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.attention import tile_device as td
from dsv4.ops.core.launch import launch_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.kv.entry_device import FP8, pool_format

MOST_ROWS = 65536  # unpacked at a time: 67 MB for entries of 512 channels
ROWS = 16  # unpacked per program


def num_rows(num_tokens: int, num_sequences: int, window: int, num_entries: int) -> int:
    """Rows to unpack for a step."""
    return num_tokens + num_sequences * (window - 1 + num_entries)


@triton.jit
def _unpack_rows(
    out, to, entry, there, seq, table, width, pool, ENTRIES: tl.constexpr, T: tl.constexpr
):
    """Unpack entries, addressed through their tables' rings, to rows of `out`. Masked slots read
    the first entry and are not written."""
    entry = tl.where(there, entry, 0)
    page = tl.load(table + seq * width + (entry // ENTRIES) % width, mask=there, other=0)
    slot = page.to(tl.int64) * ENTRIES + entry % ENTRIES
    scales = slot
    if T.kind == 2:
        scales = tl.load(pool.scale + slot)
    for i in tl.static_range(len(td.pieces(T.dim, T.rope))):
        x = td.load_piece(
            pool, scales, slot, td.piece_first(T.dim, T.rope, i), td.pieces(T.dim, T.rope)[i], T
        )
        channel = td.piece_first(T.dim, T.rope, i) + tl.arange(0, td.pieces(T.dim, T.rope)[i])
        tl.store(out + to[:, None] * T.dim + channel[None, :], x, mask=there[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_older", "older_width", "w_width", "c_width"])
def _unpack_kernel(
    out, at, first_rows, starts, ends, num_tokens, num_sequences, num_older, older_width, window,
    ratio, w_width, c_width, ROWS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Programs for the new tokens, then the windows before them, then compressed entries."""
    before = window - 1
    recent = num_tokens + num_sequences * before
    recent_programs = tl.cdiv(recent, ROWS)
    program = tl.program_id(0)
    if program < recent_programs:
        i = program * ROWS + tl.arange(0, ROWS)
        new = i < num_tokens
        row = tl.where(new, i, 0)
        seq = tl.where(new, tl.load(at.seq_idx + row).to(tl.int32), (i - num_tokens) // before)
        seq = tl.minimum(seq, num_sequences - 1)
        back = before - (i - num_tokens) % before  # from the first new token
        position = tl.load(starts + seq).to(tl.int32) - back
        position = tl.where(new, tl.load(at.positions + row).to(tl.int32), position)
        row = tl.where(new, row, tl.load(first_rows + seq).to(tl.int32) - back)
        _unpack_rows(
            out, row.to(tl.int64) + (seq + 1) * before, position, (i < recent) & (position >= 0),
            seq.to(tl.int64), at.w_table, w_width, at.w_pool, T.w_entries, T,
        )  # fmt: skip
    else:
        i = (program - recent_programs) * ROWS + tl.arange(0, ROWS)
        seq = tl.minimum(i // older_width, num_sequences - 1)
        entry = i - seq * older_width
        visible = tl.load(ends + seq).to(tl.int32) // ratio
        _unpack_rows(
            out, recent + i.to(tl.int64), entry, (i < num_older) & (entry < visible),
            seq.to(tl.int64), at.c_table, c_width, at.c_pool, T.c_entries, T,
        )  # fmt: skip


def max_entries(compressed) -> int:
    """Compressed entries that a sequence may have."""
    return 0 if compressed is None else compressed.table.shape[1] * compressed.pool.page_entries


def unpack(q, to):
    """Rows of all entries, and the first compressed row."""
    batch, pool, window = to.batch, to.pool, to.window
    tokens, sequences, held = batch.num_tokens, to.table.shape[0], max_entries(to.compressed)
    dtype = torch.float16 if pool_format(pool) == FP8 else torch.bfloat16
    rows = workspace(pool.device, f"unpacked_{pool.format}", MOST_ROWS * pool.dim, dtype)
    recent = tokens + sequences * (window - 1)
    programs = triton.cdiv(recent, ROWS) + triton.cdiv(sequences * held, ROWS)
    places, (_, *widths) = td.tile_places(to)
    _unpack_kernel[(programs,)](
        rows, places, batch.first_rows, batch.starts, batch.ends, tokens, sequences,
        sequences * held, max(held, 1), window, td.ratio_of(to), *widths, ROWS=ROWS,
        T=td.tile_format(q, to), **launch_options(4),
    )  # fmt: skip
    return rows, recent
