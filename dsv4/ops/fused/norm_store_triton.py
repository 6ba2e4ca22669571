# mypy: ignore-errors
"""`rms_norm`, `kv_store` and `compress` in one launch, with one or a few new tokens per sequence.

A program is a token and a job: 0 the latent's norm, 1 the window key, 2 the entry, 3 the index key.
Each job runs its op's kernel code with the same tile and number of warps, so the bits are the same.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend
from dsv4.ops.core.launch import ROW_WARPS, dependent_options
from dsv4.ops.gemm.quantize_rows_triton import row_buffers, row_constants, store_row
from dsv4.ops.kv import compress_triton, kv_store_triton
from dsv4.ops.kv.compress_triton import block_sizes, close_block, state_sizes
from dsv4.ops.kv.entry_device import pool_constants, pool_tensors, tl_dtype
from dsv4.ops.kv.kv_store_triton import store_key
from dsv4.ops.norm import rms_norm_triton
from dsv4.ops.norm.rms_norm_triton import norm_row

_SHARED = ("FORMAT", "NOPE", "DIM", "PAD", "SCALES", "LOG", "FACTOR")


@triton.jit(do_not_specialize=["w_width", "c_width"])
def _state_kernel(
    x, x_stride, x_weight, x_out, eps, frequencies, positions, seq_idx, slots, starts, first_rows,
    kv, kv_stride, kv_norm, w_table, w_width, w_entries, w_data, w_tail, w_scale,
    c_values, c_gates, c_ape, c_norm, c_state_v, c_state_z, c_data, c_tail, c_scale,
    i_values, i_gates, i_ape, i_norm, i_state_v, i_state_z, i_data, i_tail, i_scale,
    c_table, c_width, c_entries, codes, code_scales, row_scale, columns,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, JOBS: tl.constexpr,
    RATIO: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, STEP: tl.constexpr,
    OVERLAP: tl.constexpr, WIDTH: tl.constexpr, WPAD: tl.constexpr,
    I_WIDTH: tl.constexpr, I_WPAD: tl.constexpr,
    FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    SCALES: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr,
    I_FORMAT: tl.constexpr, I_NOPE: tl.constexpr, I_DIM: tl.constexpr, I_PAD: tl.constexpr,
    I_SCALES: tl.constexpr, I_LOG: tl.constexpr, I_FACTOR: tl.constexpr,
    ROPE: tl.constexpr, BITS: tl.constexpr, TILED: tl.constexpr, DT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`c_*` are the entries' compressor and pool, `i_*` the index keys'; both use one table. BITS 4
    or 8: also store the latent quantised (gemm/quantize_rows_triton.py)."""
    row = tl.program_id(0)
    job = tl.program_id(1)
    depend(DEPENDENT)
    if job == 0:
        own = row.to(tl.int64)
        value = norm_row(x, x_weight, x_out, own, x_stride, eps, SIZE, SIZE_PAD, True)
        if BITS > 0:
            store_row(
                value, codes, code_scales, row_scale, own, 1, columns, SIZE_PAD, TILED, BITS == 8
            )
    elif job == 1:
        store_key(
            kv, kv_stride, kv_norm, frequencies, positions, seq_idx, row, w_table, w_width,
            w_entries, eps, w_data, w_tail, w_scale,
            FORMAT, NOPE, DIM, PAD, SCALES, LOG, FACTOR, ROPE, DT,
        )  # fmt: skip
    else:
        position = tl.load(positions + row).to(tl.int32)
        seq = tl.load(seq_idx + row).to(tl.int64)
        state_row = tl.load(slots + seq).to(tl.int64) * ROWS
        start = tl.load(starts + seq).to(tl.int32)
        first_row = tl.load(first_rows + seq).to(tl.int64)
        if JOBS > 2:  # noqa: SIM102 - decided by the compiler
            if (job == 2) & (position >= 0):
                close_block(
                    c_values, c_gates, c_ape, c_norm, frequencies, c_state_v, c_state_z, row,
                    position, seq, start, first_row, state_row, c_table, c_width, c_entries,
                    eps, c_data, c_tail, c_scale, RATIO, ROWS, SLOTS, STEP, OVERLAP, WIDTH, WPAD,
                    True, FORMAT, NOPE, DIM, PAD, SCALES, LOG, FACTOR, ROPE, DT,
                )  # fmt: skip
        if JOBS > 3:  # noqa: SIM102
            if (job == 3) & (position >= 0):
                close_block(
                    i_values, i_gates, i_ape, i_norm, frequencies, i_state_v, i_state_z, row,
                    position, seq, start, first_row, state_row, c_table, c_width, c_entries,
                    eps, i_data, i_tail, i_scale, RATIO, ROWS, SLOTS, STEP, OVERLAP, I_WIDTH,
                    I_WPAD, True, I_FORMAT, I_NOPE, I_DIM, I_PAD, I_SCALES, I_LOG, I_FACTOR,
                    ROPE, DT,
                )  # fmt: skip


def supports(latent, norm, key, blocks) -> str | None:
    batch = key.batch
    if not batch.appends_at_once or batch.num_tokens == 0:
        return "not one or a few new tokens for each sequence"
    if norm is None or latent.dim() != 2:
        return "the latent's norm has no weight"
    reason = rms_norm_triton.supports(latent, norm, key.eps)
    reason = reason or kv_store_triton.supports(**vars(key))
    for block in blocks:
        reason = reason or compress_triton.supports(**vars(block))
        if block.dtype != key.kv.dtype or block.eps != key.eps:
            reason = reason or "compressors and keys differ in dtype or eps"
    if blocks and pool_constants(blocks[0].pool) != pool_constants(key.pool):
        reason = reason or "entries and window keys differ in format"
    if len(blocks) == 2 and _differ(*blocks):
        reason = reason or "the two compressors differ in ratio, table or pages"
    return reason


def _differ(a, b) -> bool:
    return (
        a.ratio != b.ratio
        or a.table.data_ptr() != b.table.data_ptr()
        or a.table.shape != b.table.shape
        or a.pool.page_entries != b.pool.page_entries
    )


def run(latent, norm, key, blocks, rows=None):
    """`rows` (quantize_rows_triton.QuantizedRows): also store the latent quantised there."""
    x, kv, batch, window = latent, key.kv, key.batch, key.pool
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = dict.fromkeys(("RATIO", "ROWS", "WIDTH", "WPAD", "SLOTS", "STEP", "OVERLAP"), 1)
    first = blocks[0] if blocks else None
    if first is not None:
        sizes = {**state_sizes(first.ratio, first.values, first.state),
                 **block_sizes(first.ratio)}  # fmt: skip
    second = blocks[1] if len(blocks) > 1 else first
    width = second.values.shape[1] if second else 1
    index = pool_constants(second.pool if second else window)
    table = first.table if first else key.table
    _state_kernel[(batch.num_tokens, 2 + len(blocks))](
        x, x.stride(0), norm, out, key.eps, key.frequencies, batch.positions,
        batch.seq_idx, batch.slots, batch.starts, batch.first_rows, kv, kv.stride(0), key.norm,
        key.table,
        key.table.shape[1], window.page_entries, *pool_tensors(window),
        *_block_tensors(first, kv), *_block_tensors(second, kv),
        table, table.shape[1], (first.pool if first else window).page_entries,
        *row_buffers(rows, x),
        SIZE=x.shape[1], SIZE_PAD=triton.next_power_of_2(x.shape[1]), JOBS=2 + len(blocks),
        **sizes, I_WIDTH=width, I_WPAD=triton.next_power_of_2(width),
        **pool_constants(window), **{f"I_{name}": index[name] for name in _SHARED},
        ROPE=2 * key.frequencies.shape[0], **row_constants(rows), DT=tl_dtype(kv.dtype),
        **dependent_options(x.device, ROW_WARPS),
    )  # fmt: skip
    return out


def _block_tensors(block, unused):
    """A compressor's tensors as the kernel takes them; any tensor where there is none."""
    if block is None:
        return (unused,) * 9
    state = block.state
    return (
        block.values, block.gates, block.ape, block.norm, state.values, state.gates,
        *pool_tensors(block.pool),
    )  # fmt: skip
